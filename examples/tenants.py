"""Let urgent requests go first, or divide the engine among tenants by their weights."""

from collections import Counter

from paged import LLMEngine, SamplingParams

params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)


def order_of_ends(engine: LLMEngine) -> list[str]:
    ended = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    return ended


# Two seats for five requests. A lower number is more urgent, and takes the place of a running request.
engine = LLMEngine("demo", scheduling_policy="priority", max_num_seqs=2)
for i in range(4):
    engine.add_request(f"batch-{i}", "import os\n", params, priority=10)
engine.step()
engine.add_request("urgent", "def main():", params, priority=0)
print("they end in this order:", order_of_ends(engine))

# The paying tenant gets three times the tokens of the free one, although it came later.
engine = LLMEngine("demo", scheduling_policy="fair", tenant_weights={"paying": 3.0}, max_num_seqs=4)
for tenant in ("free", "paying"):
    for i in range(12):
        engine.add_request(f"{tenant}-{i}", "def f(x):", params, tenant=tenant)
first_half = order_of_ends(engine)[:12]
print("of the first 12:", dict(Counter(name.split("-")[0] for name in first_half)))
