"""Asks SGLang's attention registry whether it would build a backend. Runs inside the environment under test."""

from __future__ import annotations

import builtins
import importlib
import traceback
from typing import Any

__all__ = ["ask"]


class _Reached(BaseException):
    """The registry was satisfied and went on to the backend itself."""


class _Runner:
    """As much of a ModelRunner as the registry's checks read; anything else is past them."""

    def __init__(self, server_args: Any, model_config: Any, *, mla: bool) -> None:
        self.server_args, self.model_config, self.use_mla_backend = server_args, model_config, mla

    def __getattr__(self, name: str) -> Any:
        raise _Reached(name)


def ask(server_args: Any, resolved: dict[str, Any]) -> dict[str, str]:
    """{backend: answer} of SGLang's attention registry for the backends that were resolved."""
    common = resolved.get("attention_backend")
    staged = {resolved.get(f"{stage}_attention_backend") or common for stage in ("prefill", "decode")}
    names = sorted(str(name) for name in staged if name)
    try:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        known = registry.ATTENTION_BACKENDS
        model_config = _model_config(server_args)
        _publish(server_args)
        mla = getattr(model_config.attention_arch, "name", "") == "MLA"
    except Exception as error:  # noqa: BLE001 - a version without this registry is a fact to report, not a fault
        return dict.fromkeys(names, f"not asked: {type(error).__name__}: {error}")
    runner = _Runner(server_args, model_config, mla=mla)
    return {name: _call(registry, known[name], runner) if name in known else "absent" for name in names}


def _publish(server_args: Any) -> None:
    """As the launching process does before it spawns: some of the registry's checks read the published widths."""
    arguments = importlib.import_module("sglang.srt.server_args")
    if hasattr(arguments, "publish"):
        arguments.publish(server_args, role="tokenizer")
    elif hasattr(arguments, "set_global_server_args_for_tokenizer"):
        arguments.set_global_server_args_for_tokenizer(server_args)


def _model_config(server_args: Any) -> Any:
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    return overrides.model_config_of(server_args)


def _call(registry: Any, build: Any, runner: _Runner) -> str:
    """Call one entry of the registry up to where it imports or builds its backend."""
    real = builtins.__import__

    def stop_at_backend(name: str, names: Any = None, *rest: Any, **more: Any) -> Any:
        if (names or {}).get("__name__") == registry.__name__ and "backend" in name.rpartition(".")[2]:
            raise _Reached(name)
        return real(name, names, *rest, **more)

    builtins.__import__ = stop_at_backend  # type: ignore[assignment]
    try:
        build(runner)
    except _Reached:
        return "passes"
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename == registry.__file__:
            return f"rejected: {type(error).__name__}: {error}"
        return f"not asked: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the runner is a stand-in: what it cannot answer is not a rejection
        return f"not asked: {type(error).__name__}: {error}"
    finally:
        builtins.__import__ = real
    return "passes"
