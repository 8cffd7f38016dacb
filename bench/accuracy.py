"""How close the executor's numbers are to `transformers`' on the same weights: logits error and greedy agreement.

    python bench/accuracy.py [--dtype float32] [--kernels torch native] [--prompts 4] [--prompt-tokens 64]
        [--new-tokens 64]

The oracle is transformers' own model in float32. For SmolLM2 it is built here from the GGUF file with weights
that are dequantised by the `gguf` package's own reader, so that nothing of the engine's loader is trusted. A tiny
random Llama goes through a Hugging Face folder, in one file and sharded. Prints a table and one JSON line per model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from engine.executor.factory import build_torch_executor
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models.packaged import packaged_gguf_path

#: GGUF tensor of a layer -> transformers module of a layer.
GGUF_TO_TRANSFORMERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Agreement:
    """max_abs: largest logit difference; relative: norm of the difference over norm of the oracle's logits.

    greedy_equal / greedy_total: tokens equal at the same place before the first difference of each prompt, summed.
    """

    model: str
    dtype: str
    kernels: str
    rows: int
    max_abs: float
    relative: float
    top1_equal: int
    greedy_equal: int
    greedy_total: int


def smollm2_oracle(path: Path) -> Any:
    """transformers' model with the weights of the GGUF file at `path`, float32."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(str(path))

    def fact(key: str) -> Any:
        field = reader.get_field(f"llama.{key}")
        assert field is not None, key
        return field.contents()

    heads, kv_heads = fact("attention.head_count"), fact("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=fact("vocab_size"),
        hidden_size=fact("embedding_length"),
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=fact("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=fact("context_length"),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        tie_word_embeddings=True,
    )
    raw = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    table = raw["token_embd.weight"]
    state = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    state["model.norm.weight"] = raw["output_norm.weight"]
    for layer in range(config.num_hidden_layers):
        for theirs, ours in GGUF_TO_TRANSFORMERS.items():
            weight = raw[f"blk.{layer}.{theirs}.weight"]
            if theirs in {"attn_q", "attn_k"}:
                weight = rotate_half_rows(weight, heads if theirs == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in state.items()})
    return model


def rotate_half_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row r of the second-half layout, one by one: written from the definition, unlike the loader's reshape."""
    dim = weight.shape[0] // heads
    source = [head * dim + 2 * (r % (dim // 2)) + r // (dim // 2) for head in range(heads) for r in range(dim)]
    return weight[source]


def tiny_model(
    folder: Path, family: str = "llama", *, shard_size: str | None = None, seed: int = 0, **overrides: Any
) -> Any:
    """A random model of `family` saved to `folder` as safetensors (many files when `shard_size` is small): the oracle.

    Norms and biases are random too: as a library makes them, ones and zeros, they would hide that they are not read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(settings | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    limit = {} if shard_size is None else {"max_shard_size": shard_size}
    model.save_pretrained(folder, **limit)
    return model


def executor_for(
    path: Path | None, *, dtype: str = "float32", kernels: str = "torch", page_size: int = 16, pages: int = 256
) -> TorchExecutor:
    """The engine's own executor on `path` (None: the packaged SmolLM2)."""
    return build_torch_executor(
        EngineConfig.model_validate(
            {
                "model": ModelConfig(path=path),
                "cache": CacheConfig(page_size=page_size, num_pages=pages),
                "executor": ExecutorConfig.model_validate({"dtype": dtype, "kernels": kernels}),
            }
        )
    )


def compare(executor: TorchExecutor, oracle: Any, prompts: list[list[int]], *, new_tokens: int) -> Agreement:
    """Logits of every prompt row, then `new_tokens` greedy tokens of all prompts decoded as one batch."""
    errors, norms, largest, top1, rows = 0.0, 0.0, 0.0, 0, 0
    driver = ManualDriver(executor)
    sequences = []
    for i, prompt in enumerate(prompts):
        sequence = driver.add(f"logits-{i}", prompt)
        got = executor.forward(driver.batch([(sequence, len(prompt))]), rows=list(range(len(prompt)))).float()
        driver.release(sequence)
        with torch.inference_mode():
            want = oracle(torch.tensor([prompt])).logits[0]
        errors += float((got - want).double().square().sum())
        norms += float(want.double().square().sum())
        largest = max(largest, float((got - want).abs().max()))
        top1 += int((got.argmax(-1) == want.argmax(-1)).sum())
        rows += len(prompt)
        sequences.append(driver.add(f"greedy-{i}", prompt))
    driver.generate(sequences, new_tokens)
    equal = 0
    for sequence, prompt in zip(sequences, prompts, strict=True):
        want_tokens = greedy(oracle, prompt, new_tokens)
        pairs = zip(sequence.outputs, want_tokens, strict=True)
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), new_tokens)
    return Agreement(
        model=executor.info().model,
        dtype=executor.info().dtype,
        kernels=executor.info().attention_backend.replace("cpu", "torch"),
        rows=rows,
        max_abs=largest,
        relative=(errors / norms) ** 0.5,
        top1_equal=top1,
        greedy_equal=equal,
        greedy_total=new_tokens * len(prompts),
    )


def greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of the oracle; end tokens do not end it."""
    oracle.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        answer = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    assert len(tokens) == count, f"the oracle stopped after {len(tokens)} of {count} tokens"
    return tokens


def random_prompts(vocab: int, *, count: int, length: int) -> list[list[int]]:
    """Seeded prompts of `length` to `length + count - 1` tokens: lengths off the page boundary included."""
    rng = np.random.default_rng(20)
    return [rng.integers(vocab // 500, vocab, length + i).tolist() for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", choices=("torch", "native"), nargs="+", default=["torch", "native"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    results = []

    def measure(path: Path | None, oracle: Any) -> None:
        for kernels in args.kernels:
            executor = executor_for(path, dtype=args.dtype, kernels=kernels)
            prompts = random_prompts(executor.info().vocab_size, count=args.prompts, length=args.prompt_tokens)
            results.append(compare(executor, oracle, prompts, new_tokens=args.new_tokens))

    measure(None, smollm2_oracle(packaged_gguf_path()))
    for name, shard_size in (("tiny-one-file", None), ("tiny-sharded", "100KB")):
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base) / name
            measure(folder, tiny_model(folder, shard_size=shard_size, hidden_size=128))
    print(
        f"{'model':<24}{'dtype':<10}{'kernels':<8}{'rows':>6}{'max abs':>11}{'relative':>11}{'top-1':>12}{'greedy':>12}"
    )
    for r in results:
        print(
            f"{r.model:<24}{r.dtype:<10}{r.kernels:<8}{r.rows:>6}{r.max_abs:>11.2e}{r.relative:>11.2e}"
            f"{f'{r.top1_equal}/{r.rows}':>12}{f'{r.greedy_equal}/{r.greedy_total}':>12}"
        )
    for r in results:
        print(json.dumps({"bench": "accuracy", "torch": torch.__version__, **asdict(r)}))


if __name__ == "__main__":
    main()
