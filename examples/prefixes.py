"""Share the KV of a common beginning: from the cache, among samples, and saved for another process."""

import tempfile
from pathlib import Path

from paged import LLMEngine, SamplingParams

SYSTEM = "# This module reads and writes files.\nimport os\nimport sys\nimport json\n\n\n" * 4
engine = LLMEngine("demo")
params = SamplingParams(temperature=0, max_tokens=16)

# The first request computes the beginning, all later ones find its full blocks.
for name in ("read", "write", "close"):
    (output,) = engine.generate([f"{SYSTEM}def {name}("], params, use_tqdm=False)
    print(name, output.num_cached_tokens, "of", len(output.prompt_token_ids), "prompt tokens were cached")

# Samples share the blocks of their prompt. The block that each writes into is copied first.
engine.add_request("four", SYSTEM + "class File:", SamplingParams(n=4, max_tokens=16, seed=1))
engine.step()
sequences = [request.blocks.tables[0].tolist() for request in engine.scheduler.running]
blocks = {block for table in sequences for block in table}
print(f"{len(sequences)} samples have {sum(map(len, sequences))} blocks, of which {len(blocks)} differ")
while engine.has_unfinished_requests():
    engine.step()

# Saved, the beginning is there from the start of another engine.
with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "system.safetensors"
    print(engine.save_prefix(path, SYSTEM), "blocks saved")
    other = LLMEngine("demo")
    other.load_prefix(path)
    (output,) = other.generate([SYSTEM + "def open("], params, use_tqdm=False)
    print("another engine:", output.num_cached_tokens, "prompt tokens were cached")
