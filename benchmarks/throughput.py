"""How fast is the engine on nano-vllm's workload, compared with transformers?

    python -m benchmarks.throughput
    python -m benchmarks.throughput --shapes tinyllama-1.1b --batches 16 --scale 0.1

Runs `benchmarks.peers`, with its options, on prompts and outputs of 100 to 1024 tokens times the scale, all
requests at once, against the padded static batches of generate() and the continuous batching of
generate_batch().
"""

from __future__ import annotations

import sys

from benchmarks.peers.__main__ import main

WAYS = ["paged-float32", "generate-float32", "generate_batch-float32"]
CHOICES = ["--workload", "nano-vllm", "--shapes", "demo", "--batches", "16", "--scale", "0.5"]
REHEARSAL = ["--batches", "2", "--scale", "0.02"]

if __name__ == "__main__":
    choices = CHOICES + REHEARSAL if "--rehearse" in sys.argv else CHOICES
    main([*choices, "--ways", *WAYS, *sys.argv[1:]], name="throughput", description=__doc__)
