"""Headrace and a peer on the very same workload, interleaved, with windows of the machine's limits between them.

    python benchmarks/peers.py [MODEL] --peer-python PYTHON [--concurrency 1 --concurrency 8 ...] [--rounds 5] [--out FILE]
    python benchmarks/peers.py --summarize FILE

The peer is OpenVINO GenAI's continuous batching in process, without HTTP, which favours it: `--peer-python` is the interpreter of an
environment that has `openvino-genai`, `--peer-script` what it runs. A round draws a fresh seed and runs both on the same prompts and
lengths, the first one alternating. The figures are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import floor
from serving import LATENCIES, Rounds, Row, add_rounds, append, drive, requests_for, serving

from headrace.models.hub import default_model_path

# The script prints its own summary; what it measured is taken from its globals, for the percentiles it does not print.
RUN_PEER = """
import json, runpy, sys
from pathlib import Path
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
found = runpy.run_path(script)
keep = {name: found[name] for name in ("ttft", "itl", "tokens_in", "tokens_out", "wall")}
print("MEASURED " + json.dumps(keep))
"""


def run_peer(python: str, script: Path, model: Path, concurrency: int, options: list[str]) -> Row:
    """One run of the peer, in the form of `serving.drive`."""
    command = [python, "-c", RUN_PEER, str(script), str(model), str(concurrency), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED ")), None)
    if line is None:
        raise SystemExit(f"the peer failed with code {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(line.removeprefix("MEASURED "))
    outcome = floor.Outcome(
        wall=found["wall"],
        ttft=[value / 1e3 for value in found["ttft"]],
        itl=[value / 1e3 for value in found["itl"]],
        tokens_in=found["tokens_in"],
        tokens_out=found["tokens_out"],
    )
    return outcome.summary() | {"ok": len(found["ttft"]), "wrong_count": 0, "cached_in": 0}


def compare(rows: list[Row]) -> None:
    """Medians over rounds: ratios of ours to the peer's, and both absolute."""
    pairs: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        pairs.setdefault((row["concurrency"], row["seed"]), {})[row["server"]] = row
    names = ["out_tps", *LATENCIES]
    print(f"{'conc':>4} {'rounds':>6} {'':10} " + " ".join(f"{name:>10}" for name in names) + f" {'of floor':>9}")
    for concurrency in sorted({key[0] for key in pairs}):
        both = [pair for key, pair in pairs.items() if key[0] == concurrency and len(pair) == 2]
        for server in ("headrace", "peer"):
            values = " ".join(f"{statistics.median(pair[server][name] for pair in both):10.2f}" for name in names)
            bound = statistics.median(pair[server]["of_floor"] for pair in both)
            print(f"{concurrency:4} {len(both):6} {server:10} {values} {bound:9.1%}")
        ratios = " ".join(f"{statistics.median(pair['headrace'][name] / pair['peer'][name] for pair in both):10.2f}" for name in names)
        print(f"{concurrency:4} {len(both):6} {'ratio':10} {ratios}")
    ours = [row for row in rows if row["server"] == "headrace"]
    cached, wrong = sum(row["cached_in"] for row in ours), sum(row["wrong_count"] for row in ours)
    reads = sorted(row["limits"]["read"] / 1e9 for row in rows)
    print(
        f"{sum(row['ok'] for row in ours)} requests, cached prompt tokens {cached}, answers of another length than asked {wrong}, ", end=""
    )
    print(f"read bandwidth {reads[0]:.0f} to {reads[-1]:.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rounds(parser)
    parser.add_argument("--peer-python", default=".venv-openvino/bin/python")
    parser.add_argument("--peer-script", type=Path, default=Path("../shared/bench/peer_openvino.py"))
    parser.add_argument("--summarize", type=Path, help="print the table of rounds recorded with --out; run nothing")
    a = parser.parse_args()
    if a.summarize:
        compare([json.loads(line) for line in a.summarize.read_text().splitlines()])
        return
    path = a.model or default_model_path()
    client = floor.load_client(a.client)
    rows: list[Row] = []
    with serving(path, a.serve_flags.split()) as (server, _):
        rounds = Rounds(path, client, a.threads)
        for index in range(a.rounds):
            for concurrency in a.concurrency or [1, 8, 32]:
                seed = random.randrange(10**6)
                options = floor.client_options(a, concurrency, requests_for(concurrency, a.requests), seed)
                runs = {
                    "headrace": lambda options=options: drive(client, server, options),
                    "peer": lambda options=options, c=concurrency: run_peer(a.peer_python, a.peer_script, path, c, options),
                }
                for name in sorted(runs, reverse=bool(index % 2)):
                    row = {"server": name, "concurrency": concurrency, "seed": seed, **rounds.run(runs[name], options)}
                    rows.append(row)
                    append(a.out, row)
                    print(f"{name} at {concurrency}: {row['out_tps']} tok/s, {row['of_floor']:.0%} of the floor", file=sys.stderr)
    if a.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        compare(rows)


if __name__ == "__main__":
    main()
