"""Lets SGLang's CPU engine import on a machine without CUDA. First on PYTHONPATH of the server under test.

PyPI's torchvision is built against a CUDA torch: beside a CPU torch its import fails with "operator torchvision::nms
does not exist". Declaring the operators' schemas before torchvision is imported is enough: a text server calls none.
"""

import importlib.abc
import importlib.machinery
import sys

_OPERATOR = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


# A torch Library takes its operators with it when it is collected: held here for the life of the process.
_held = []


class _DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                _held.append(library)
                for name in ("nms", "qnms"):
                    library.define(_OPERATOR.format(name))
        return


sys.meta_path.insert(0, _DeclareTorchvisionOperators())
