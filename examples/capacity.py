"""Ask how many GPUs a load needs, without a GPU: the real scheduler runs on a virtual clock."""

import json
import tempfile
from pathlib import Path

from paged import EngineConfig
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.workload import Workload

# The shape of a model of 8 billion parameters. No weights are needed.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}

with tempfile.TemporaryDirectory() as directory:
    (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
    for replicas in (1, 2):
        num_requests, arrivals = Workload(rate=60, requests=1000, seed=0).open()
        fleet = Fleet(FleetConfig(gpu="H100", replicas=replicas), EngineConfig(directory))
        summary = fleet.run(arrivals).summary()
        rate, first_token = summary["requests_per_s"], summary["ttft_s"]
        print(
            f"{replicas} H100: {rate:.0f} requests/s, first token after {first_token['p50'] * 1e3:.0f} ms, "
            f"p99 {first_token['p99'] * 1e3:.0f} ms"
        )
