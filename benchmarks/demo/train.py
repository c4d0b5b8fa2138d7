"""Train the demo checkpoint: a small Llama on the source of Python's standard library.

    python -m benchmarks.demo.train --out DIR

writes everything in paged/demo: tokenizer, weights in bfloat16, model card and the
licence of the data. The same seed, thread count, CPython, torch and tokenizers give the same weights.
No network and no GPU are needed; the default run takes about half an hour on two CPU cores.
"""

import argparse
import contextlib
import copy
import hashlib
import math
import os
import platform
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged.architectures.config import DEMO
from paged.text.chat_template import PLAIN_TEMPLATE

EOS = "<|endoftext|>"  # id 0; stands between files
VOCAB_SIZE = 4096
MAX_LEN = 2048
# Tests, because most builds of CPython leave them out; tables and generated text, because they are not code;
# config-* and _sysconfigdata*, because they hold paths of the machine that built Python.
SKIPPED_DIRS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
# A space belongs to the word before it: `def ` is one token, so a prompt that ends in a space looks like
# the training text. With GPT-2's leading spaces it would end in a token that training hardly contains.
WORD = r"\w+ ?|[^\w\s]+ ?|\s+"

TOKENS_PER_STEP = 4096
PASSES_PER_STEP = 2  # so that logits and attention stay in a CPU's cache
WARMUP_STEPS = 50
# (from this share of the run on, window length): short is fast on a CPU; the last part earns MAX_LEN.
WINDOWS = ((0.0, 256), (0.8, 512), (0.92, MAX_LEN))


@dataclass(frozen=True)
class Score:
    """Held-out loss: per token, per byte, and per token in each quarter of a full window."""

    nats_per_token: float
    bits_per_byte: float
    by_quarter: list[float]


def read_corpus(stdlib: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on and the held-out ones: one module in twenty, by a hash of its path."""
    train: list[str] = []
    heldout: list[str] = []
    names = {path.relative_to(stdlib).as_posix(): path for path in stdlib.rglob("*.py")}
    for name, path in sorted(names.items()):
        parts = name.split("/")
        if SKIPPED_DIRS & set(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        with contextlib.suppress(UnicodeDecodeError):  # a few modules are in another encoding
            text = path.read_bytes().decode("utf-8")
            (heldout if hashlib.sha256(name.encode()).digest()[0] % 20 == 0 else train).append(text)
    return train, heldout


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which reproduces any text and adds no tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Encode the texts to one stream i64[num_tokens]: EOS, file, EOS, file, ..., EOS."""
    tokenizer.encode_special_tokens = True  # a file that spells EOS is text, not the end of a file
    stream = [0]
    for encoding in tokenizer.encode_batch(texts):
        stream += [*encoding.ids, 0]
    tokenizer.encode_special_tokens = False
    return torch.tensor(stream)


def build_model() -> LlamaForCausalLM:
    """Build a Llama in which four query heads share a KV head, as in large models, to exercise GQA."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def token_losses(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the cross-entropy of every next token: i64[batch, len + 1] -> f32[batch, len]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    targets = windows[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: Tensor, num_bytes: int) -> Score:
    """Score the stream in windows that do not overlap, with the weights rounded to bfloat16 as shipped."""
    rounded = copy.deepcopy(model).bfloat16().float()
    starts = range(0, len(stream) - 1, MAX_LEN)
    losses = [token_losses(rounded, stream[None, i : i + MAX_LEN + 1])[0] for i in starts]
    total = torch.cat(losses).double().sum().item()
    by_quarter = [part.mean().item() for part in torch.stack(losses[:-1]).chunk(4, dim=1)]
    return Score(total / (len(stream) - 1), total / math.log(2) / num_bytes, by_quarter)


def train(model: LlamaForCausalLM, stream: Tensor, steps: int, seed: int, out: Path) -> None:
    """Train with Muon for the hidden matrices and AdamW for the rest: linear warm-up, then linear to zero."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def scale(step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, (steps - step) / steps)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, scale) for optimizer in optimizers]
    saved_at = time.monotonic()
    progress = tqdm(range(steps), unit_scale=TOKENS_PER_STEP, unit="token", mininterval=5)
    for step in progress:
        length = max(length for start, length in WINDOWS if step >= start * steps)
        starts = torch.randint(len(stream) - length, (TOKENS_PER_STEP // length,), generator=generator)
        windows = stream[starts[:, None] + torch.arange(length + 1)]
        loss = 0.0
        for part in windows.chunk(PASSES_PER_STEP):
            with torch.autocast("cpu", torch.bfloat16):
                part_loss = token_losses(model, part).sum() / TOKENS_PER_STEP
            torch.autograd.backward(part_loss)
            loss += part_loss.item()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        progress.set_postfix(loss=f"{loss:.3f}", len=length, refresh=False)
        if time.monotonic() - saved_at > 180:  # a run that is cut short leaves a usable checkpoint
            save_model(model, out)
            saved_at = time.monotonic()


def save_model(model: LlamaForCausalLM, out: Path) -> None:
    """Write config and weights in bfloat16; a file appears whole or not at all."""
    rounded = copy.deepcopy(model).bfloat16()
    rounded.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    with tempfile.TemporaryDirectory(dir=out) as partial:
        rounded.save_pretrained(partial)
        for path in Path(partial).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer as `AutoTokenizer` reads it."""
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOS)
    limits = {"model_max_length": MAX_LEN, "clean_up_tokenization_spaces": False}
    files = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **limits)
    files.chat_template = PLAIN_TEMPLATE
    files.save_pretrained(out)


def complete(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Return `prompt` and 64 sampled tokens in a Markdown block."""
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    tokens = model.generate(ids, max_new_tokens=64, do_sample=True, temperature=0.7, pad_token_id=0)
    return f"```python\n{tokenizer.decode(tokens[0].tolist())}\n```"


def main() -> None:
    """Train the demo checkpoint and write it."""
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("--out", type=Path, default=DEMO, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--threads", type=int, default=2, help="part of what makes a run repeatable")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    stdlib = Path(sysconfig.get_path("stdlib"))
    (args.out / "LICENSE-PSF.txt").write_bytes((stdlib / "LICENSE.txt").read_bytes())
    texts = read_corpus(stdlib)
    tokenizer = train_tokenizer(texts[0])
    save_tokenizer(tokenizer, args.out)
    streams = [encode(tokenizer, part) for part in texts]
    num_bytes = [sum(len(text.encode()) for text in part) for part in texts]
    sizes = [f"{len(texts[i])} files, {num_bytes[i]:,} bytes, {len(streams[i]):,} tokens" for i in range(2)]

    model = build_model()
    before = evaluate(model, streams[1], num_bytes[1])
    train(model, streams[0], args.steps, args.seed, args.out)
    save_model(model, args.out)
    shipped = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    after = evaluate(shipped, streams[1], num_bytes[1])
    prompts = ("def ", "class Foo", "import ")
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    card = template.format(
        **vars(args),
        before=before,
        after=after,
        config=shipped.config,
        max_len=MAX_LEN,
        num_parameters=sum(p.numel() for p in shipped.parameters()),
        quarters=", ".join(f"{loss:.3f}" for loss in after.by_quarter),
        python=platform.python_version(),
        train_size=sizes[0],
        heldout_size=sizes[1],
        tokens_per_step=TOKENS_PER_STEP,
        windows=", ".join(f"{length} from {start:.0%} on" for start, length in WINDOWS),
        versions=", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, tokenizers)),
        minutes=(time.monotonic() - started) / 60,
        samples="\n\n".join(complete(shipped, tokenizer, prompt, args.seed) for prompt in prompts),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
