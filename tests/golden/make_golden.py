#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes gpt2_golden.json: what PyTorch computes in double precision for the
models, weights and batches of the golden tests.

    python3 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch numpy xxhash
    /tmp/golden/bin/python tests/golden/make_golden.py

The model is GPT-2 (Radford et al. 2019) written plainly: pre-norm blocks, GELU
in its tanh form, causal attention, tensors named and laid out as Hugging Face
stores them. Ballast's own initial weights (common/initial_value.h), text
(tests/golden/golden_text.h) and sample order (worker/data/sampler.h) are
computed here a second time, so the tests compare the product and not a copy.

Set "gradients": one batch, every tensor random. Loss sum; of the gradient of
that sum, for each tensor, its norm, its product with a fixed vector and four
elements.
Set "training": 50 steps of torch.optim.AdamW with clipping and a warm-up and
cosine schedule. Mean loss and gradient norm of each step, held-out loss after.
"""

import json
import math
import os

import numpy as np
import torch
import xxhash

MASK32 = np.uint64(0xFFFFFFFF)
MASK64 = (1 << 64) - 1


def philox(key, counter_low, counter_high):
    """Philox4x32-10 (common/random.h): four uint64 arrays of 32-bit words.

    Any of the arguments may be an array; all are unsigned 64-bit.
    """
    low, high = np.broadcast_arrays(
        np.asarray(counter_low, np.uint64), np.asarray(counter_high, np.uint64)
    )
    half = np.uint64(32)
    x = [low & MASK32, low >> half, high & MASK32, high >> half]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * x[0]
        p1 = np.uint64(0xCD9E8D57) * x[2]
        x = [
            (p1 >> half) ^ x[1] ^ np.uint64(k0),
            p1 & MASK32,
            (p0 >> half) ^ x[3] ^ np.uint64(k1),
            p0 & MASK32,
        ]
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x


def stream_of(name):
    return xxhash.xxh3_128_intdigest(name.encode()) & MASK64


def normal(seed, stream, count):
    words = philox(seed, np.arange(count), stream)
    unit = [(w.astype(np.float64) + 0.5) * 2.0**-32 for w in words[:2]]
    return np.sqrt(-2.0 * np.log(unit[0])) * np.cos(2.0 * np.pi * unit[1])


def initial(name, shape, std, seed, mean=0.0):
    """fp32 values, as a double tensor."""
    count = math.prod(shape)
    values = (std * normal(seed, stream_of(name), count)).astype(np.float32)
    values = values + np.float32(mean)
    return torch.from_numpy(values.astype(np.float64)).reshape(shape)


def golden_text(byte_count):
    """Words of a small language: 16 words, each followed by one of four."""
    words = []
    for word in range(16):
        length = 3 + int(philox(7, word, 0)[0]) % 4
        letters = [int(philox(7, word, 1 + i)[0]) % 26 for i in range(length)]
        words.append(bytes(97 + letter for letter in letters))
    text = b""
    word = index = 0
    while len(text) < byte_count:
        text += words[word] + b" "
        word = (5 * word + int(philox(8, index, 0)[0]) % 4) % 16
        index += 1
    return text[:byte_count]


def permute_sample(seed, epoch, count, index):
    if count == 1:
        return 0
    half_bits = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    stream = (stream_of("data.order") + epoch) & MASK64
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for turn in range(6):
            word = int(philox(seed, (turn << 32) | right, stream)[0])
            left, right = right, left ^ (word & mask)
        value = (left << half_bits) | right
        if value < count:
            return value


class Sampler:
    """Offsets of sequences; see worker/data/sampler.h."""

    def __init__(self, job, text_bytes):
        self.job = job
        tail = math.floor(text_bytes * job["validation_fraction"])
        self.eval_begin = text_bytes - tail
        self.train_samples = (self.eval_begin - 1) // job["context"]
        self.eval_samples = (tail - 1) // job["context"]

    def train_offset(self, step, micro_batch, index):
        job = self.job
        sample = (step - 1) * job["micro_batches"] + micro_batch
        sample = sample * job["micro_batch_size"] + index
        epoch, position = divmod(sample, self.train_samples)
        return job["context"] * permute_sample(
            job["seed"], epoch, self.train_samples, position
        )

    def eval_offset(self, sequence):
        total = self.job["eval_micro_batches"] * self.job["micro_batch_size"]
        window = sequence * self.eval_samples // total
        return self.eval_begin + self.job["context"] * window


def specs(model):
    """(name, shape, std, mean) of every tensor, as a run starts from them."""
    width, context = model["width"], model["context"]
    vocabulary, layers = model["vocabulary"], model["layers"]
    out_std = 0.02 / math.sqrt(2 * layers)
    result = [
        ("wte.weight", (vocabulary, width), 0.02, 0.0),
        ("wpe.weight", (context, width), 0.01, 0.0),
    ]

    def norm(name):
        result.append((name + ".weight", (width,), 0.0, 1.0))
        result.append((name + ".bias", (width,), 0.0, 0.0))

    def linear(name, rows, columns, std):
        result.append((name + ".weight", (rows, columns), std, 0.0))
        result.append((name + ".bias", (columns,), 0.0, 0.0))

    for layer in range(layers):
        norm(f"h.{layer}.ln_1")
        linear(f"h.{layer}.attn.c_attn", width, 3 * width, 0.02)
        linear(f"h.{layer}.attn.c_proj", width, width, out_std)
        norm(f"h.{layer}.ln_2")
        linear(f"h.{layer}.mlp.c_fc", width, 4 * width, 0.02)
        linear(f"h.{layer}.mlp.c_proj", 4 * width, width, out_std)
    norm("ln_f")
    if not model["tied"]:
        result.append(("lm_head.weight", (vocabulary, width), 0.02, 0.0))
    return result


def loss_sum(model, weights, ids, targets):
    """Cross-entropy in nats, summed over all tokens. ids (batch, tokens)."""
    functional = torch.nn.functional
    width, heads = model["width"], model["heads"]
    batch, tokens = ids.shape

    def norm(x, name):
        weight, bias = weights[name + ".weight"], weights[name + ".bias"]
        return functional.layer_norm(x, (width,), weight, bias, 1e-5)

    def linear(x, name):
        return x @ weights[name + ".weight"] + weights[name + ".bias"]

    def split(x):
        return x.view(batch, tokens, heads, width // heads).transpose(1, 2)

    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    x = weights["wte.weight"][ids] + weights["wpe.weight"][:tokens]
    for layer in range(model["layers"]):
        block = f"h.{layer}."
        fused = linear(norm(x, block + "ln_1"), block + "attn.c_attn")
        q, k, v = (split(part) for part in fused.split(width, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
        share = scores.masked_fill(~mask, -math.inf).softmax(dim=3)
        mixed = (share @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + linear(mixed, block + "attn.c_proj")
        inner = linear(norm(x, block + "ln_2"), block + "mlp.c_fc")
        inner = functional.gelu(inner, approximate="tanh")
        x = x + linear(inner, block + "mlp.c_proj")
    head = weights["wte.weight" if model["tied"] else "lm_head.weight"]
    logits = norm(x, "ln_f") @ head.T
    rows = logits.view(-1, model["vocabulary"])
    return functional.cross_entropy(rows, targets.reshape(-1), reduction="sum")


def batch_of(text, offsets, context):
    rows = [list(text[o : o + context + 1]) for o in offsets]
    both = torch.tensor(rows)
    return both[:, :-1], both[:, 1:]


def short(value):
    return float(f"{value:.10g}")


def fixed_vector(count):
    """Over [-0.5, 0.5); in the product a wrong element or order shows."""
    spread = np.arange(count, dtype=np.uint64) * np.uint64(2654435761) & MASK32
    return torch.from_numpy(spread.astype(np.float64) * 2.0**-32 - 0.5)


def gradients(tied):
    model = dict(
        vocabulary=256, width=32, layers=2, heads=4, context=16, tied=tied
    )
    seed, sequences = 3, 2
    # Every tensor is random here, so that no gradient is trivial.
    weights = {
        name: initial(name, shape, 0.1, seed, mean).requires_grad_()
        for name, shape, _, mean in specs(model)
    }
    text = golden_text(1000)
    offsets = [model["context"] * i for i in range(sequences)]
    ids, targets = batch_of(text, offsets, model["context"])
    loss = loss_sum(model, weights, ids, targets)
    loss.backward()
    tensors = {}
    for name, weight in weights.items():
        flat = weight.grad.reshape(-1)
        # Four of the larger elements, at fixed ranks.
        order = flat.abs().argsort(descending=True, stable=True)
        picks = [int(order[len(flat) * k // 16]) for k in range(4)]
        tensors[name] = dict(
            norm=short(flat.norm()),
            product=short(flat @ fixed_vector(len(flat))),
            at=picks,
            values=[short(flat[i]) for i in picks],
        )
    return dict(
        model=model,
        seed=seed,
        sequences=sequences,
        loss_sum=short(loss.item()),
        tensors=tensors,
    )


def learning_rate(job, step):
    """Linear warm-up from lr / warmup, then a cosine that ends at step S."""
    if step <= job["warmup_steps"]:
        return job["lr"] * step / job["warmup_steps"]
    span = job["steps"] - job["warmup_steps"]
    turn = 0.5 * (1 + math.cos(math.pi * (step - job["warmup_steps"]) / span))
    floor = job["lr"] * job["min_lr_ratio"]
    return floor + (job["lr"] - floor) * turn


def training(tied):
    model = dict(
        vocabulary=256, width=64, layers=2, heads=4, context=32, tied=tied
    )
    job = dict(
        steps=50, seed=5, context=32, micro_batches=2, micro_batch_size=4,
        validation_fraction=0.05, eval_micro_batches=2, text_bytes=8000,
        lr=3e-3, warmup_steps=10, min_lr_ratio=0.1, beta1=0.9, beta2=0.95,
        epsilon=1e-8, weight_decay=0.1, clip_norm=1.0,
    )
    weights = {
        name: initial(name, shape, std, job["seed"], mean).requires_grad_()
        for name, shape, std, mean in specs(model)
    }
    matrices = [w for w in weights.values() if w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            dict(params=matrices, weight_decay=job["weight_decay"]),
            dict(params=vectors, weight_decay=0.0),
        ],
        lr=job["lr"],
        betas=(job["beta1"], job["beta2"]),
        eps=job["epsilon"],
    )
    text = golden_text(job["text_bytes"])
    sampler = Sampler(job, len(text))
    steps = []
    first_offsets = None
    for step in range(1, job["steps"] + 1):
        offsets = [
            sampler.train_offset(step, m, i)
            for m in range(job["micro_batches"])
            for i in range(job["micro_batch_size"])
        ]
        first_offsets = first_offsets or offsets
        ids, targets = batch_of(text, offsets, job["context"])
        optimizer.zero_grad()
        loss = loss_sum(model, weights, ids, targets) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            weights.values(), job["clip_norm"]
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.step()
        steps.append([short(loss.item()), short(norm.item())])
    sequences = job["eval_micro_batches"] * job["micro_batch_size"]
    offsets = [sampler.eval_offset(i) for i in range(sequences)]
    ids, targets = batch_of(text, offsets, job["context"])
    with torch.no_grad():
        held_out = loss_sum(model, weights, ids, targets) / targets.numel()
    return dict(
        model=model,
        job=job,
        text_begin=text[:32].decode(),
        first_offsets=first_offsets,
        steps=steps,
        validation_loss=short(held_out.item()),
    )


def main():
    torch.set_default_dtype(torch.float64)
    golden = dict(
        gradients=[gradients(True), gradients(False)],
        training=[training(True), training(False)],
    )
    output = os.path.join(os.path.dirname(__file__), "gpt2_golden.json")
    with open(output, "w", encoding="ascii") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")
    for case in golden["training"]:
        print(case["steps"][0], case["steps"][-1], case["validation_loss"])


if __name__ == "__main__":
    main()
