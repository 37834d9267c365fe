"""Does the output canary catch planted errors, and let sound configurations pass? Against a real SGLang.

Run it with the interpreter that has SGLang (torch and safetensors plant the errors), from the project's folder:

    PYTHONPATH=tests/envs/sglang-cpu-shim python tests/e2e/canary_sensitivity.py --out out.jsonl.gz    # CPU engine
    python tests/e2e/canary_sensitivity.py --device cuda --shape llama-3 --jobs 4 --out out.jsonl.gz  # a GPU
    python tests/e2e/canary_sensitivity.py --table out.jsonl.gz                # judge those answers with today's limits

One server start a variant, `--seeds` sets of prompts each, compared with the same prompts' answers of the reference.
Nothing of SGLang's own files is changed: errors are planted in config.json and in weights; the stale KV page by
wrapping the prefix cache from `planted/sitecustomize.py`.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pytest_gpuserve.measure.canary import PARTS, Answer, ask, compare, prompts  # noqa: E402
from pytest_gpuserve.measure.tolerance import Tolerance, tolerance_of  # noqa: E402
from pytest_gpuserve.model.cell import ModelSpec  # noqa: E402
from pytest_gpuserve.models import shapes  # noqa: E402
from pytest_gpuserve.models.materialise import materialise  # noqa: E402
from pytest_gpuserve.serve import procs  # noqa: E402
from pytest_gpuserve.serve.litter import SharedMemory  # noqa: E402

START = 300.0


class NoServer(Exception):
    """It did not start, or does not answer."""


PAGE = 16


@dataclass
class Variant:
    """`sound` ones must pass. `flags` and `env` are the server's; `config` and `weights` change the model's folder."""

    name: str
    sound: bool
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    weights: object = None
    kv: str = "auto"

    @property
    def file(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


def scaled(part: str, factor: float):
    """Every weight whose name ends in `part` times `factor`: of an fp8 checkpoint its scale."""

    def change(name, tensor):
        scale = name.endswith(f"{part}_scale_inv")
        if scale or (name.endswith(part) and tensor.element_size() > 1):
            return (tensor.float() * factor).to(tensor.dtype)
        return tensor

    return change


def head_zeroed(size: int, head: int = 1, layer: int = 0):
    """One head of one layer contributes nothing: its columns of o_proj are zero."""

    def change(name, tensor):
        if name == f"model.layers.{layer}.self_attn.o_proj.weight":
            tensor = tensor.clone()
            tensor[:, head * size : (head + 1) * size] = 0
        return tensor

    return change


def block_scaled(part: str, factor: float, layer: int = 0, block: int = 128):
    """One block's scale is wrong: of an fp8 checkpoint the scale itself, else the weights under it."""

    def change(name, tensor):
        prefix = f"model.layers.{layer}.{part}"
        if name == f"{prefix}.weight_scale_inv":
            tensor = tensor.clone()
            tensor[0, 0] *= factor
        elif name == f"{prefix}.weight" and tensor.element_size() > 1:
            tensor = tensor.clone()
            tensor[:block, :block] *= factor
        return tensor

    return change


def variants(args, config: dict) -> list[Variant]:
    mla = "kv_lora_rank" in config
    # Where queries and keys are normed, their projections' scale is taken out again.
    kind = "norm" if config["model_type"].startswith("qwen3") else "proj"
    query = "q_b_proj.weight" if mla else f"q_{kind}.weight"
    head = config["v_head_dim"] if mla else config["head_dim"]
    key = "kv_b_proj.weight" if mla else f"k_{kind}.weight"
    rope = dict(config.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)

    def with_theta(factor: float) -> dict:
        changed = {"rope_theta": theta * factor}
        return changed | ({"rope_parameters": rope | changed} if rope else {})

    sound = [
        Variant("a second start", True),
        Variant("--chunked-prefill-size 64", True, ("--chunked-prefill-size", "64")),
        Variant("--disable-radix-cache", True, ("--disable-radix-cache",)),
        Variant("--dtype float16", True, ("--dtype", "float16")),
    ]
    sound += [Variant(text, True, tuple(text.split())) for text in args.sound]
    sound += [Variant(f"--kv-cache-dtype {kv}", True, ("--kv-cache-dtype", kv), kv=kv) for kv in args.sound_kv]
    planted = [
        Variant("rope theta +1 %", False, config=with_theta(1.01)),
        Variant("rope theta +10 %", False, config=with_theta(1.1)),
        Variant("softmax scale +5 %", False, weights=scaled(query, 1.05)),
        Variant("one head of one layer zeroed", False, weights=head_zeroed(head)),
        Variant("one stale KV page", False, env={"PLANTED_STALE_PAGE": str(PAGE)}),
        Variant("one 128 × 128 block's scale × 2", False, weights=block_scaled("mlp.down_proj", 2.0)),
        Variant("scale of the keys + 25 %", False, weights=scaled(key, 1.25)),
    ]
    stale = {"PLANTED_STALE_PAGE": str(PAGE)}
    planted += [
        Variant(f"{kv} KV cache, one stale page", False, ("--kv-cache-dtype", kv), env=stale, kv=kv)
        for kv in args.sound_kv
    ]
    return [one for one in (*sound, *planted) if not args.only or any(word in one.name for word in args.only)]


def planted_model(model: Path, variant: Variant, folder: Path) -> Path:
    """A copy of the model's folder with the variant's errors in it; the model itself if it has none."""
    if not variant.config and variant.weights is None:
        return model
    copy = folder / variant.file / "model"
    copy.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors" and variant.weights is None:
            # Gigabytes that this variant does not change.
            (copy / file.name).symlink_to(file)
        elif file.suffix != ".safetensors":
            shutil.copy(file, copy)
    if variant.config:
        file = copy / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | variant.config))
    if variant.weights is not None:
        from safetensors.torch import load_file, save_file

        changed = 0
        for file in model.glob("*.safetensors"):
            before = load_file(file)
            after = {name: variant.weights(name, tensor) for name, tensor in before.items()}
            changed += sum(after[name] is not tensor for name, tensor in before.items())
            save_file(
                {name: tensor.contiguous() for name, tensor in after.items()},
                copy / file.name,
                metadata={"format": "pt"},
            )
        if not changed:
            raise SystemExit(f"{variant.name}: no tensor of {model} was changed")
    return copy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_flags(args) -> list[str]:
    """What every server of this device needs; `--flag` comes after, and of a flag given twice SGLang takes the last."""
    if args.device != "cpu":
        return []
    words = "--device cpu --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.3"
    return [*words.split(), "--max-total-tokens", "4096"]


def backend_of(words: list[str]) -> str:
    """The attention backend that was asked for last."""
    at = [index for index, word in enumerate(words) if word == "--attention-backend"]
    return words[at[-1] + 1] if at else ""


@contextmanager
def server(args, model: Path, variant: Variant, folder: Path):
    """`send(body)` of a server that is ready; the whole session is ended afterwards."""
    port, nccl = free_port(), free_port()
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    words += ["--port", str(port), "--nccl-port", str(nccl), "--page-size", str(PAGE)]
    words += [*own_flags(args), *args.flag, *variant.flags]
    tmp = tempfile.mkdtemp(prefix="gs-")  # short: ZeroMQ's sockets lie in it
    env = {**os.environ, "SPT_NOENV": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": tmp, **variant.env}
    paths = [str(Path(__file__).parent / "planted"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    if args.device == "cpu":
        # One thread: on a busy machine threads that wait for each other cost more than they bring.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / f"{variant.file}.log"
    memory = SharedMemory(tmp)
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)

    def send(body: dict) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise NoServer(f"{variant.name}: HTTP {response.status}: {text[:300]!r}")
            return json.loads(text)
        finally:
            connection.close()

    try:
        deadline = time.monotonic() + START
        while b"fired up and ready" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoServer(f"{variant.name}: no server; the log ends:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield send
    finally:
        pids = session(process.pid)
        memory.observe(pids, thorough=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while session(process.pid):
            time.sleep(0.05)
        memory.clean(pids)
        shutil.rmtree(tmp)


def session(leader: int) -> list[int]:
    """The living processes of the session that a server leads."""
    stats = filter(None, map(procs.read_stat, procs.all_pids()))
    return [stat.pid for stat in stats if stat.sid == leader and not stat.zombie]


def run(args) -> None:
    """Every variant's answers to `args.out`, a line each, as they come; the reference's first."""
    folder = Path(tempfile.mkdtemp(prefix="gpuserve-canary-"))
    asked = {"quantization": args.quantization} if args.quantization else {}
    spec = ModelSpec(name=args.shape, shape=args.shape, layers=args.layers, properties=asked)
    model = materialise(spec, python=sys.executable, env={}, weights=True)
    config = json.loads((model / "config.json").read_text())
    longest = min(config["max_position_embeddings"], 2048)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    plans = [prompts(config["vocab_size"], longest, seed) for seed in seeds]
    writing = threading.Lock()

    def answer(variant: Variant) -> None:
        begun = time.monotonic()
        backend = backend_of([*own_flags(args), *args.flag, *variant.flags])
        line = {"variant": variant.name, "sound": variant.sound, "kv": variant.kv, "backend": backend, "answers": []}
        try:
            with server(args, planted_model(model, variant, folder), variant, folder) as send:
                answering = time.monotonic()
                for plan in plans:
                    if time.monotonic() - answering > args.seconds:
                        break
                    line["answers"].append([one.to_json() for one in ask(send, plan)])
        except NoServer as error:
            # A backend that does not exist on this machine: the others are still worth their time.
            line["error"] = str(error)[-2000:]
        finally:
            shutil.rmtree(folder / variant.file, ignore_errors=True)
        with writing:
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(f"{variant.name}: {len(line['answers'])} sets, {time.monotonic() - begun:.0f} s", flush=True)

    with gzip.open(args.out, "wt", compresslevel=6) as out, ThreadPoolExecutor(args.jobs) as pool:
        head = {
            "shape": args.shape,
            "device": args.device,
            "layers": config["num_hidden_layers"],
            "vocabulary": config["vocab_size"],
            "longest": longest,
            "first_seed": args.first_seed,
            "properties": shapes.properties(args.shape) | asked,
        }
        out.write(json.dumps(head) + "\n")
        list(pool.map(answer, [Variant("reference", True), *variants(args, config)]))
    shutil.rmtree(folder, ignore_errors=True)


def judge(file: Path) -> list[dict]:
    """A row for every variant of an earlier run, with the comparison and the limits of now."""
    lines = []
    # A run that was ended by force leaves a file without an end: what was written is still worth judging.
    with gzip.open(file, "rt") as read, suppress(EOFError):
        lines += [json.loads(line) for line in read]
    head, *lines = lines
    reference = next(line for line in lines if line["variant"] == "reference")["answers"]
    rows = []
    for line in lines:
        if line["variant"] == "reference":
            continue
        if not line["answers"]:
            print(f"| {line['variant']} | no server: {line['error'].splitlines()[-1][:200]} | | | | |")
            continue
        seeds = [
            compare(prompts(head["vocabulary"], head["longest"], seed), loaded(mine), loaded(theirs))
            for seed, (mine, theirs) in enumerate(zip(line["answers"], reference, strict=False), head["first_seed"])
        ]
        properties = head["properties"]
        tolerance = tolerance_of(
            line["kv"],
            moe=properties["moe"] == "true",
            attention=properties["attention"],
            quantization=properties["quantization"],
            backend=line["backend"],
        )
        rows.append(
            {
                "variant": line["variant"],
                "sound": line["sound"],
                "seeds": len(seeds),
                "tolerance": tolerance,
                "parts": {
                    part: {
                        "mean": [one.mean for parts in seeds for one in parts if one.part == part],
                        "p99": [one.p99 for parts in seeds for one in parts if one.part == part],
                    }
                    for part in PARTS
                },
            }
        )
        print(line_of(rows[-1]))
    return rows


def loaded(answers: list[dict]) -> list[Answer]:
    return [Answer.from_json(one) for one in answers]


def caught(row: dict) -> dict[str, int]:
    """In how many seeds each part is beyond the row's tolerance as it is now, and (`any`) at least one of them."""
    tolerance: Tolerance = row["tolerance"]
    beyond = {}
    for part, values in row["parts"].items():
        mean, p99 = tolerance.of(part)
        beyond[part] = [m > mean or p > p99 for m, p in zip(values["mean"], values["p99"], strict=True)]
    return {part: sum(flags) for part, flags in beyond.items()} | {
        "any": sum(any(flags) for flags in zip(*(one for one in beyond.values() if one), strict=True))
    }


def line_of(row: dict) -> str:
    """One row of a Markdown table: mean and p99 as the least and the most of all seeds."""
    cells = []
    for part in PARTS:
        mean, p99 = row["parts"][part]["mean"], row["parts"][part]["p99"]
        cells.append(f"{min(mean):.3f}–{max(mean):.3f}, {min(p99):.2f}–{max(p99):.2f}" if mean else "")
    kind = "sound" if row["sound"] else "planted"
    found = caught(row)
    by = ", ".join(f"{part} {found[part]}" for part in PARTS if found[part])
    verdict = f"{found['any']} of {row['seeds']}" + (f" ({by})" if by else "")
    return f"| {row['variant']} | {kind} | {' | '.join(cells)} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="tiny-llama")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quantization", help="as a model entry of a matrix names it")
    parser.add_argument("--seeds", type=int, default=20, help="sets of prompts")
    parser.add_argument("--first-seed", type=int, default=0, help="others than limits were set by: 20")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="of asking, a variant; fewer seeds if it takes more"
    )
    parser.add_argument("--jobs", type=int, default=1, help="servers at once, on one GPU")
    parser.add_argument("--flag", action="append", default=[], help="for every server, one word each: --flag=--dtype …")
    parser.add_argument("--sound", action="append", default=[], help="a further sound variant, its flags in one text")
    parser.add_argument("--sound-kv", action="append", default=[], help="a KV cache dtype that is sound")
    parser.add_argument("--only", action="append", default=[], help="variants whose name holds this text")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="start the servers and write all their answers here (.jsonl.gz)")
    what.add_argument("--table", type=Path, help="only judge the answers of an earlier run's --out; starts nothing")
    args = parser.parse_args()
    if args.out:
        run(args)
    print("| variant | | prefill: mean, p99 | cached | decode | caught |\n|---|---|---|---|---|---|")
    rows = judge(args.out or args.table)
    wrong = [row for row in rows if caught(row)["any"] != (0 if row["sound"] else row["seeds"])]
    for row in wrong:
        print(f"NOT as it should be: {row['variant']}: caught {caught(row)['any']} of {row['seeds']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
