"""Embed texts, and score continuations of a prompt."""

from paged import LLMEngine

engine = LLMEngine("demo")

texts = ["def add(a, b):\n    return a + b", "def sub(a, b):\n    return a - b", '"""The GNU license."""']
vectors = [output.outputs.embedding for output in engine.embed(texts, pooling="mean", use_tqdm=False)]
for i, text in enumerate(texts):
    # They have a length of 1, so that the dot product is the cosine.
    similar = [sum(x * y for x, y in zip(vectors[i], other, strict=True)) for other in vectors]
    print(f"{text[:14]!r:18}", *(f"{value:6.3f}" for value in similar))

# The prompt's KV is shared by all continuations.
continuations = ["sys\n", "re\n", "banana\n"]
scores = engine.score("import os\nimport ", continuations, use_tqdm=False)
for text, score in zip(continuations, scores, strict=True):
    print(f"{text!r:12} log-probability {score.logprob:7.2f}")
