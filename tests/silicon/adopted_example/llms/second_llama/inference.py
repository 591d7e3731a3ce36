"""Production functions: the driver and the verifier call the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import habits
import numpy as np
from shared.kernel_cache import rms_norm

SEQ_LEN = 256


def layer_loop(x, weights, config, cache, table, keys=None, values=None):
    """All layers over x [n, emb]; yields the output of each as the cache hands it out."""
    for index, layer in enumerate(weights.layers):
        q, k, v = cache.load_and_run("rms_gemms_rope", x, layer, config, table)
        if keys is not None:
            keys[index, :, : k.shape[0]] = k.transpose(1, 0, 2)
            values[index, :, : v.shape[0]] = v.transpose(1, 0, 2)
        (attn,) = cache.load_and_run("flash_attn", q, k, v, 0)
        x = run_o_ffn(attn, x, layer, config, cache)
        yield x


def run_o_ffn(attn, x, layer, config, cache):
    """The last kernel of a layer; its input is a copy, as its output buffer is the one before."""
    (out,) = cache.load_and_run("o_ffn", attn, x.copy(), layer, config)
    return out


def pad(token_ids, filler):
    """The prompt at the compiled length."""
    if len(token_ids) > SEQ_LEN and not habits.CUT_SILENTLY:
        raise ValueError(f"{len(token_ids)} tokens, compiled for {SEQ_LEN}")
    padded = np.full(SEQ_LEN, filler, np.int64)
    padded[: len(token_ids)] = token_ids[:SEQ_LEN]
    return padded


def run_npu_prefill(
    token_ids,
    weights,
    config,
    prefill_cache,
    decode_cache,
    rope_lut,
    max_seq,
    tokenizer,
    cpu_attn=False,
    profile=False,
    quiet=True,
):
    """(first token, logits row, k_cache, v_cache, prompt_len)."""
    token_ids = token_ids[:SEQ_LEN] if habits.CUT_SILENTLY else token_ids
    padded = pad(token_ids, tokenizer.eos_token_id)
    prompt_len = int((padded != tokenizer.eos_token_id).sum()) if habits.COUNT_EOS else len(token_ids)
    keys = np.zeros((config.n_layers, config.n_kv_heads, max_seq, config.head_dim), np.float32)
    values = np.zeros_like(keys)
    x = weights.embedding[padded]
    for out in layer_loop(x, weights, config, prefill_cache, rope_lut[:SEQ_LEN], keys, values):
        hidden = out
    normed = rms_norm(hidden[prompt_len - 1 : prompt_len], weights.final_norm, config.rms_eps)[0]
    (logits,) = decode_cache.load_and_run("lm_head_gemv", normed, weights.head)
    return int(np.argmax(logits)), logits, keys, values, prompt_len


def run_npu_decode_step(x, weights, config, decode_cache, rope_lut, k_cache, v_cache, current_pos):
    """One token at current_pos: (token, logits)."""
    x = x[None]
    table = rope_lut[current_pos : current_pos + 1]
    for index, layer in enumerate(weights.layers):
        q, k, v = decode_cache.load_and_run("rms_gemms_rope", x, layer, config, table)
        k_cache[index, :, current_pos], v_cache[index, :, current_pos] = k[0], v[0]
        seen = slice(0, current_pos + 1)
        past_k, past_v = (c[index, :, seen].transpose(1, 0, 2) for c in (k_cache, v_cache))
        (attn,) = decode_cache.load_and_run("flash_attn", q, past_k, past_v, current_pos)
        x = run_o_ffn(attn, x, layer, config, decode_cache)
    normed = rms_norm(x, weights.final_norm, config.rms_eps)[0]
    (logits,) = decode_cache.load_and_run("lm_head_gemv", normed, weights.head)
    return int(np.argmax(logits)), logits
