"""Time and memory to profile models of 175 billion and of a trillion parameters in one process.

    python benchmarks/profile_175b.py             # GPT-3 175B: 96 layers, hidden 12288, at tensor degrees 1, 2, 4, 8
    python benchmarks/profile_175b.py --model moe # a mixture of 10^12 parameters: 24 layers of 960 experts

Models are on the meta device. Seconds are processor time of the one process, in which other work of the machine does
not count, except by the caches that it takes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import resource
import sys
import time

SETTINGS = {
    "gpt": {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200},
    "moe": {
        "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "experts": 960, "top_k": 1, "ffn": 21248,
        "mlp": "gelu", "seq": 512, "vocab": 51200,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SETTINGS, default="gpt")
    parser.add_argument("--profile", help="write a cProfile file")
    given = parser.parse_args()
    begin = time.process_time()
    from whale.cli.model_loader import load_model
    from whale.cli.profile_text import format_profile
    from whale.graph.capture import capture
    from whale.strategies.profile import profile_model

    loaded = load_model(f"examples/models/{given.model}.py:{given.model}", SETTINGS[given.model], device="meta")
    built = time.process_time()
    profiler = cProfile.Profile()
    if given.profile:
        profiler.enable()
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8), name=loaded.name)
    done = time.process_time()
    profiler.disable()
    if given.profile:
        profiler.dump_stats(given.profile)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    capture(loaded.model, loaded.batch)
    print(format_profile(profile))
    figures = {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "build_seconds": built - begin,
        "profile_seconds": done - built,
        "of_which_capture_about": time.process_time() - done,
        "together_seconds": done - begin,
        "peak_gb": peak,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
