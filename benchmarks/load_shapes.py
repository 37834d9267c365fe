"""Every shape's tensors against SGLang's own model class, without a GPU: does each name find its place, in its size?

    ENV/bin/python benchmarks/load_shapes.py [--arch sm100] [SHAPE/QUANTIZATION …]

Run by the interpreter of the environment under test. The model is built at full size on torch's `meta` device, with a
pretended GPU, and `load_weights` gets every tensor that `models/inside/tensors.py` names. One line a shape: parameters
that no tensor reached, and what went wrong. Parameters that SGLang derives itself are not counted (`_DERIVED`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "pytest_gpuserve/preflight"), str(_ROOT / "pytest_gpuserve/models/inside")]
# KV scales that a checkpoint may lack, NVFP4 scales in the kernels' order, and two that are copied without a loader.
_DERIVED = ("k_scale", "v_scale", "_blockscale_swizzled", "wk_weights_proj.weight", ".sinks")


def _pretend(arch: str) -> None:
    """A GPU and its kernel packages, as preflight pretends them, and a torch whose GPU tensors are `meta`."""
    import _fakegpu  # type: ignore[import-not-found]

    _fakegpu.define_torchvision_ops()
    with contextlib.suppress(ImportError):
        import tvm_ffi  # type: ignore[import-not-found]  # noqa: F401 - before anything stands in for CUDA's bindings
    gpu = _fakegpu.FakeGpu(arch, cuda="13.0", driver="580.95.05", count=1)
    gpu.install()
    _fakegpu.stand_in({**_fakegpu.kernels_required(arch), "cuda": "13.0"})
    import torch
    from torch.overrides import TorchFunctionMode

    def elsewhere(device: Any) -> Any:
        with contextlib.suppress(RuntimeError, TypeError):
            return "meta" if torch.device(device).type == "cuda" else device
        return device

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = elsewhere(kwargs["device"])
            if getattr(func, "__name__", "") == "to":
                args = tuple(elsewhere(one) if isinstance(one, (str, torch.device)) else one for one in args)
            return args[0] if getattr(func, "__name__", "") == "cuda" else func(*args, **kwargs)

    class Nothing:
        def __init__(self, *_args: Any, **_more: Any) -> None: ...

        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_more: None

    OnMeta().__enter__()
    torch.cuda.Stream = torch.cuda.Event = Nothing
    # Shapes of kernels that are not there, and their number of SMs, which the sparse indexer asks for.
    torch.library.register_fake = lambda *_args, **_more: lambda function: function
    importlib.import_module("deep_gemm").get_num_sms = lambda: 132


def _call(function: Any, *arguments: Any) -> None:
    """With as many arguments as this release's signature takes."""
    wanted = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    function(*arguments[len(arguments) - len(wanted) :])


def _start(folder: Path, quantization: str) -> Any:
    """What a scheduler does before it builds its model; the model's config."""
    from sglang.srt import server_args as arguments

    argv = ["--model-path", str(folder), "--disable-cuda-graph"]
    argv += ["--quantization", "modelopt_fp4"] if quantization == "nvfp4" else []
    given = arguments.prepare_server_args(argv)
    try:
        context = importlib.import_module("sglang.srt.runtime_context")
        ranks = {"ranks": context.SpawnRanks(world_rank=0, gpu_id=0)} if hasattr(context, "SpawnRanks") else {}
        (context if ranks else arguments).publish(given, role="scheduler", **ranks)
    except (ImportError, AttributeError):
        arguments.set_global_server_args_for_scheduler(given)
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization import fp4_utils, fp8_utils

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    config = ModelConfig.from_server_args(given)
    _call(initialize_dp_attention, given, config)
    _call(initialize_moe_config, given)
    _call(fp8_utils.initialize_fp8_gemm_config, given)
    _call(fp4_utils.initialize_fp4_gemm_config, given)
    return config


def _load(folder: Path, config: Any) -> list[str]:
    """Build the model, load the tensors; the parameters that nothing was loaded into."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.model_loader.weight_utils import default_weight_loader
    from tensors import tensors_of  # type: ignore[import-not-found]

    load_config = LoadConfig(load_format="auto")
    quantization = loader._get_quantization_config(config, load_config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        model = loader._initialize_model(config, load_config, quantization)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reached: set[str] = set()

    def noting(load: Any) -> Any:
        def noted(parameter: Any, *rest: Any, **more: Any) -> Any:
            reached.add(names.get(id(parameter), ""))
            return load(parameter, *rest, **more)

        return noted

    for parameter in model.parameters():
        attribute = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
        if hasattr(parameter, attribute):
            setattr(parameter, attribute, noting(getattr(parameter, attribute)))
    for module in list(sys.modules.values()):
        if getattr(module, "default_weight_loader", None) is default_weight_loader:
            module.default_weight_loader = noting(default_weight_loader)
    types = {"f32": torch.float32, "fp8": torch.float8_e4m3fn, "bits": torch.uint8, "e8m0": torch.uint8}
    types |= {"bf16": torch.bfloat16, "scale-f32": torch.float32, "scale-fp8": torch.float8_e4m3fn}
    wanted = tensors_of(json.loads((folder / "config.json").read_text()))
    model.load_weights((one.name, torch.empty(one.shape, dtype=types[one.kind], device="meta")) for one in wanted)
    return sorted(name for name in names.values() if name not in reached and not name.endswith(_DERIVED))


def _one(shape: str, quantization: str, arch: str) -> int:
    from pytest_gpuserve.models import shapes
    from pytest_gpuserve.models.tokenizer import tokenizer_config, tokenizer_json

    config = shapes.config_of(shape, quantization=quantization)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(config["vocab_size"])))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(config["max_position_embeddings"])))
        _pretend(arch)
        left = _load(folder, _start(folder, quantization))
    print(f"{shape}/{quantization} {arch}: {'every parameter was loaded' if not left else 'not loaded: ' + str(left)}")
    return int(bool(left))


def main() -> int:
    """The command: a process a shape, 0 if all were loaded."""
    from pytest_gpuserve.models.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm100")
    parser.add_argument("shapes", nargs="*")
    options = parser.parse_args()
    every = [f"{name}/{one}" for name, shape in SHAPES.items() for one in shape.quantizations]
    if len(options.shapes) == 1:
        return _one(*options.shapes[0].split("/"), options.arch)
    worst = 0
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in options.shapes or every:
        command = [sys.executable, __file__, "--arch", options.arch, name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = [line for line in done.stdout.splitlines() if line.startswith(name)]
        print(said[-1] if said else f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the process group of one rank takes its time to end
