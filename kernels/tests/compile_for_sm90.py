"""Compiles the kernels of products, experts, norms, gates, positions and sampling, and of the gated delta rule by
chunks, for an H100 or H200; prints JSON.

Sizes of an 8B Nemotron-H in bf16 and of the small fp32 model; of a 9B Qwen3.5 and of a small model for the gated delta
rule. A process of its own: a kernel that the interpreter runs cannot be compiled. Arguments: how the names of the cases
begin that are wanted.
"""

import json
import re
import sys
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mambalign.kernels import (
    activation,
    chunk_shape,
    combine_experts,
    draft_addresses,
    draft_head,
    draw_tokens,
    expert_routing,
    gate_mul,
    gated_delta_chunk_scan,
    gated_delta_chunk_solve,
    gather_rows,
    grouped_linear,
    padded_rows,
    place_heads,
    rms_norm,
    rotary,
    sampling,
    slot_rows,
    verify_drafts,
)
from mambalign.kernels.linear_tiles import segments_of, tiles_for
from mambalign.kernels.linear_triton import GROUP_M, MERGE_BLOCK, WORD_BYTES, linear_kernel, merge_segments_kernel

TARGET = GPUTarget("cuda", 90, 32)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", draft_head.FP8: "fp8e4nv"}


def compile_kernel(kernel, types: dict[str, str], constants: dict, **options: int):
    """`types` by argument, pointers on a 16-byte boundary; what is in neither is a run-time int32."""
    names = kernel.arg_names
    constants = {**constants, "PDL": True} if "PDL" in names else constants
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    return triton.compile(source, target=TARGET, options=options)


def compile_linear(
    num_rows: int, k: int, n: int, dtype: torch.dtype, out_dtype=None, relu2=False, bias=False, tma=None
):
    tiles, (num_segments, length) = tiles_for(num_rows, k, n, dtype), segments_of(k, n)
    tma = tiles.tma if tma is None else tma
    split, word = tiles.split and num_segments > 1, WORD_BYTES // dtype.itemsize
    name, out = f"*{NAMES[dtype]}", "*fp32" if split else f"*{NAMES[out_dtype or dtype]}"
    types = dict.fromkeys(("p_x", "p_weight", "p_bias"), name) | {"p_out": out}
    if tma:
        x_tile, weight_tile = (tiles.block_m, tiles.block_k), (tiles.block_k, tiles.block_n)
        types |= {
            "p_x": f"tensordesc<{name[1:]}{list(x_tile)}>",
            "p_weight": f"tensordesc<{name[1:]}{list(weight_tile)}>",
        }
    constants = {
        "SEGMENTS": num_segments,
        "SPLIT": split,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": GROUP_M,
        "X_WORD": word if k % word == 0 else 1,
        "W_WORD": word if n % word == 0 else 1,
        "EVEN_K": k % length == 0 and length % tiles.block_k == 0,
        "EVEN_N": n % tiles.block_n == 0,
        "STREAM": num_rows <= tiles.block_m,
        "HAS_BIAS": bias,
        "RELU2": relu2,
        "TMA": tma,
    }
    return compile_kernel(linear_kernel, types, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def compile_merge(num_segments: int, dtype: torch.dtype):
    types = {"p_sums": "*fp32", "p_bias": f"*{NAMES[dtype]}", "p_out": f"*{NAMES[dtype]}"}
    constants = {"SEGMENTS": num_segments, "WORD": 8, "HAS_BIAS": False, "RELU2": False, "BLOCK": MERGE_BLOCK}
    return compile_kernel(merge_segments_kernel, types, constants)


def compile_draft_scores(num_rows: int):
    tiles, name = draft_head.tiles_for(num_rows), NAMES[draft_head.FP8]
    types = {"p_scale": "*fp32", "p_value": "*fp32", "p_index": "*i32"}
    types["p_x"] = f"tensordesc<{name}{[tiles.block_m, tiles.block_k]}>"
    types["p_weight"] = f"tensordesc<{name}{[tiles.block_n, tiles.block_k]}>"
    constants = {"BLOCK_M": tiles.block_m, "BLOCK_V": tiles.block_n, "BLOCK_K": tiles.block_k}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_kernel(draft_head.draft_scores_kernel, types, constants, **options)


def compile_scale_rows(width: int):
    types, block = {"p_x": "*bf16", "p_out": f"*{NAMES[draft_head.FP8]}"}, triton.next_power_of_2(width)
    constants = {"K": width, "OUT_K": width, "BLOCK": block}
    return compile_kernel(draft_head.scale_rows_kernel, types, constants, num_warps=max(1, block // 512))


def compile_norm(width: int, dtype: torch.dtype, num_segments: int = 0):
    block, name = triton.next_power_of_2(width), f"*{NAMES[dtype]}"
    types = dict.fromkeys(("p_x", "p_residual", "p_out", "p_total"), name) | {"p_weight": "*fp32", "eps": "fp32"}
    types |= {"p_x": "*fp32"} if num_segments else {}
    constants = {"SEGMENTS": num_segments, "D": width, "BLOCK": block, "WORD": WORD_BYTES // dtype.itemsize}
    return compile_kernel(rms_norm.rms_norm_kernel, types, constants, num_warps=min(8, max(1, block // 512)))


def compile_gated(width: int, dtype: torch.dtype):
    block, name = triton.next_power_of_2(width), f"*{NAMES[dtype]}"
    types = {"p_x": "*fp32", "p_gate": name, "p_out": name, "p_weight": "*fp32", "eps": "fp32"}
    constants = {"WIDTH": width, "BLOCK": block, "WORD": WORD_BYTES // dtype.itemsize}
    return compile_kernel(rms_norm.rms_norm_gated_kernel, types, constants, num_warps=min(8, max(1, block // 256)))


def compile_then_gate(num_heads: int, width: int, dtype: torch.dtype):
    block, name = triton.next_power_of_2(width), f"*{NAMES[dtype]}"
    block_h = rms_norm.heads_for(num_heads, block)
    types = {"p_x": "*fp32", "p_gate": name, "p_out": name, "p_weight": "*fp32", "eps": "fp32"}
    constants = {"HEADS": num_heads, "WIDTH": width, "BLOCK_H": block_h, "BLOCK": block}
    constants["WORD"] = WORD_BYTES // dtype.itemsize
    return compile_kernel(rms_norm.rms_norm_then_gate_kernel, types, constants, num_warps=block_h * block // 256)


def compile_place_heads(num_heads: int, kv_heads: int, head_dim: int, half: int, norm: bool, dtype: torch.dtype):
    """num_heads 0: heads of a token are copied as one."""
    word = WORD_BYTES // dtype.itemsize
    names = ("p_query", "p_key", "p_value", "p_key_cache", "p_value_cache", "p_table", "p_q_weight", "p_k_weight")
    types = dict.fromkeys(names, f"*{NAMES[dtype]}") | {"p_slot": "*i64", "p_positions": "*i64", "eps": "fp32"}
    types |= dict.fromkeys(("p_table", "p_q_weight", "p_k_weight"), "*fp32") if norm else {}
    constants = {"HEADS": num_heads, "KV_HEADS": kv_heads, "D": head_dim, "HALF": half, "HAS_NORM": norm}
    constants |= {"BLOCK": triton.next_power_of_2(head_dim), "WORD": word if head_dim % word == 0 else 1}
    return compile_kernel(place_heads.place_heads_kernel, types, constants, num_warps=1 if num_heads else 4)


def compile_rotary(num_heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype):
    name, power = f"*{NAMES[dtype]}", triton.next_power_of_2
    types = {"p_query": name, "p_key": name, "p_positions": "*i64", "p_table": "*fp32"}
    stride = (num_heads + 2 * kv_heads) * head_dim
    constants = {"Q_STRIDE": stride, "K_STRIDE": stride, "NUM_HEADS": num_heads, "KV_HEADS": kv_heads}
    constants |= {"HEAD_DIM": head_dim, "HALF": half}
    constants |= {"BLOCK_H": power(num_heads), "BLOCK_KV": power(kv_heads), "BLOCK_J": power(half)}
    return compile_kernel(rotary.rotary_kernel, types, constants)


def compile_sampling(which: str):
    if which == "argmax":
        types = {"p_logits": "*fp32", "p_value": "*fp32", "p_index": "*i32"}
        constants = {"WORD": 4, "SPLIT": sampling.SPLIT, "BLOCK": sampling.BLOCK}
        return compile_kernel(sampling.argmax_split_kernel, types, constants)
    types = {"p_value": "*fp32", "p_index": "*i32", "p_out": "*i64"}
    return compile_kernel(sampling.argmax_merge_kernel, types, {"BLOCK": 32}, num_warps=1)


def compile_integers(kernel, wide: str, **constants):
    """A kernel of integers only; `wide` names the pointers to int64, separated by blanks."""
    pointers = [name for name in kernel.arg_names if name.startswith("p_")]
    types = {name: "*i64" if name in wide.split() else "*i32" for name in pointers}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_kernel(kernel, types, constants, num_warps=1)


def compile_gather_rows():
    types = {"source": "*bf16", "dest": "*bf16", "index": "*i64"}
    return compile_kernel(
        gather_rows.gather_rows_kernel, types, {"SOURCE_STRIDE": 6144, "WIDTH": 4096, "BLOCK": gather_rows.BLOCK}
    )


def compile_draw():
    types = {"p_logits": "*fp32", "p_row": "*i64", "p_key": "*i64", "p_temperature": "*fp32", "p_floor": "*fp32"}
    types |= {"p_top_k": "*i64", "p_top_p": "*fp64", "p_out": "*i64"}
    constants = {"WORD": 4, "BLOCK": draw_tokens.BLOCK}
    return compile_kernel(draw_tokens.draw_tokens_kernel, types, constants, num_warps=draw_tokens.NUM_WARPS)


def compile_activation(relu2: bool):
    types = {"p_x": "*bf16", "p_out": "*bf16"}
    return compile_kernel(activation.activation_kernel, types, {"WORD": 16, "RELU2": relu2, "BLOCK": activation.BLOCK})


def compile_gate_mul(dtype: torch.dtype, x_dtype: torch.dtype, gelu: bool):
    types = {"p_gate": f"*{NAMES[dtype]}", "p_x": f"*{NAMES[x_dtype]}", "p_out": f"*{NAMES[dtype]}"}
    types |= {"gate_scale": "fp32", "scale": "fp32"}
    constants = {"GELU": gelu, "BLOCK": gate_mul.BLOCK, "WORD": gate_mul.WORD}
    return compile_kernel(gate_mul.gate_mul_kernel, types, constants)


def compile_routing(num_experts: int, top_k: int, num_groups: int, sigmoid: bool):
    types = {"p_logits": "*fp32", "p_bias": "*fp32", "p_ids": "*i32", "p_weights": "*fp32"}
    types |= {"scale": "fp32", "tiny": "fp32"}
    constants = {
        "E": num_experts,
        "NUM_PARTS": 3,
        "TOP_K": top_k,
        "NUM_GROUPS": num_groups,
        "TOP_GROUPS": max(1, num_groups // 2),
        "SIGMOID": sigmoid,
        "NORMALISED": True,
        "HAS_BIAS": sigmoid,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_K": triton.next_power_of_2(top_k),
        "BLOCK_G": triton.next_power_of_2(num_groups),
    }
    return compile_kernel(expert_routing.route_experts_kernel, types, constants, num_warps=1)


def compile_sort(block: int, num_warps: int):
    types = dict.fromkeys(("p_ids", "p_order", "p_first"), "*i32")
    return compile_kernel(expert_routing.sort_by_expert_kernel, types, {"BLOCK": block}, num_warps=num_warps)


def compile_grouped(num_pairs: int, num_experts: int, k: int, n: int, dtype: torch.dtype, up: bool, gated=False):
    tiles, name = grouped_linear.tiles_for(num_pairs, num_experts, k, n, dtype, gated), f"*{NAMES[dtype]}"
    types = dict.fromkeys(("p_x", "p_weight", "p_out"), name) | {"p_order": "*i32", "p_first": "*i32"}
    constants = {
        "E": num_experts,
        "K": k,
        "N": n,
        "TOP_K": 6,
        "FROM_TOKENS": up,
        "RELU2": up and not gated,
        "GATED": gated,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": grouped_linear.GROUP_M,
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_kernel(grouped_linear.grouped_linear_kernel, types, constants, **options)


def compile_combine(width: int, top_k: int, shared: bool, gate: bool):
    types = dict.fromkeys(("p_y", "p_shared", "p_gate", "p_out"), "*bf16") | {"p_weights": "*fp32"}
    constants = {"D": width, "TOP_K": top_k, "HAS_SHARED": shared, "HAS_GATE": gate}
    constants["BLOCK"] = combine_experts.BLOCK
    return compile_kernel(combine_experts.combine_experts_kernel, types, constants)


def compile_delta(kernel, key_heads: int, num_heads: int, k_dim: int, v_dim: int, dtype, state_dtype=torch.float32):
    solves, name = kernel is gated_delta_chunk_solve.gated_delta_chunk_solve_kernel, f"*{NAMES[dtype]}"
    types = dict.fromkeys(("p_q", "p_k", "p_v", "p_a_raw", "p_b_raw", "p_w", "p_u", "p_left", "p_mix"), name)
    types |= dict.fromkeys(("p_A", "p_dt_bias", "p_scale", "p_o"), "*fp32") | {"num_rows": "i32"}
    types |= dict.fromkeys(("p_query_start", "p_query_len", "p_temporal_block", "p_state_block"), "*i32")
    types |= {"p_temporal_state": f"*{NAMES[state_dtype]}"}
    width = 2 * key_heads * k_dim + num_heads * v_dim
    tiles = gated_delta_chunk_scan.tiles_for(v_dim, k_dim, dtype.itemsize)
    constants = {"Q_STRIDE": width, "V_STRIDE": width, "A_STRIDE": width + num_heads * (v_dim + 2)}
    constants |= {"HEADS": num_heads, "KEY_HEADS": key_heads, "K_DIM": k_dim, "V_DIM": v_dim}
    constants |= {"CHUNK": chunk_shape.DELTA_CHUNK, "BLOCK_K": tiles.block_k}
    constants |= {"BLOCK_V": tiles.block_v if solves else tiles.state_rows}
    if solves:
        constants |= {"BLOCK_R": gated_delta_chunk_scan.ROWS_AT_A_TIME, "EPS": gated_delta_chunk_scan.NORM_EPS}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    num_stages = 1 if solves else tiles.num_stages
    return compile_kernel(kernel, types, constants, num_warps=tiles.num_warps, num_stages=num_stages)


def main() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = {f"linear {m} in_proj": (compile_linear, m, 4096, 18560, bf16) for m in (1, 32, 64, 128, 512, 8192)}
    cases |= {f"linear {m} down": (compile_linear, m, 21504, 4096, bf16) for m in (1, 32, 64, 128, 512, 8192)}
    cases |= {f"linear {m} head": (compile_linear, m, 4096, 131072, bf16, fp32) for m in (1, 512)}
    cases |= {"linear up": (compile_linear, 512, 4096, 21504, bf16, None, True, True)}
    cases |= {f"linear {m} small": (compile_linear, m, 256, 1288, fp32) for m in (1, 100)}
    cases |= {
        f"linear {m} tma": (compile_linear, m, 21504, 4096, bf16, None, False, False, True) for m in (1, 64, 8192)
    }
    cases |= {"linear 8192 no tma": (compile_linear, 8192, 4096, 18560, bf16, None, False, False, False)}
    cases |= {"linear odd": (compile_linear, 1, 37, 53, bf16)}
    cases |= {"norm": (compile_norm, 4096, bf16), "norm small": (compile_norm, 256, fp32)}
    cases |= {"norm of segments": (compile_norm, 4096, bf16, 4), "merge": (compile_merge, 4, bf16)}
    cases |= {"gated": (compile_gated, 1024, bf16), "gated small": (compile_gated, 256, fp32)}
    cases |= {"then gate": (compile_then_gate, 32, 128, bf16)}
    cases |= {which: (compile_sampling, which) for which in ("argmax", "merge")}
    of_integers = partial(compile_integers, NUM_DRAFTS=3, WIDTH=4, BLOCK_W=4)
    few, many = partial(of_integers, BLOCK=4), partial(of_integers, BLOCK=slot_rows.BLOCK)
    verify, wide = verify_drafts.verify_drafts_kernel, "p_sampled p_token p_target"
    cases |= {f"verify {wanted}": (partial(few, HAS_WANTED=wanted), verify, wide) for wanted in (False, True)}
    wide = "p_row p_offset p_token p_next_token p_drafts p_token_out"
    cases |= {"gather slots": (many, slot_rows.gather_slots_kernel, wide)}
    wide = "p_token p_draft p_next_token p_drafts p_num_crossed p_results"
    cases |= {"advance slots": (few, slot_rows.advance_slots_kernel, wide)}
    cases |= {"pad rows": (many, padded_rows.pad_rows_kernel, "p_token p_token_out p_place")}
    cases |= {"pad sampled": (few, padded_rows.pad_sampled_kernel, "p_sampled p_sampled_out")}
    wide = "p_drafting p_last p_position p_slot"
    cases |= {
        f"draft addresses {some}": (
            partial(many, PASSES=3, KV_BLOCK=16, IS_LIST=some),
            draft_addresses.draft_addresses_kernel,
            wide,
        )
        for some in (False, True)
    }
    cases |= {f"draft scores {m}": (compile_draft_scores, m) for m in (1, 32, 64, 128, 256)}
    cases |= {"scale rows": (compile_scale_rows, 4096)}
    cases |= {"gather rows": (compile_gather_rows,)}
    cases |= {"draw": (compile_draw,)}
    cases |= {f"activation {relu2}": (compile_activation, relu2) for relu2 in (False, True)}
    cases |= {"rotary": (compile_rotary, 32, 8, 128, 64, bf16), "rotary half": (compile_rotary, 6, 2, 33, 8, fp32)}
    cases |= {
        "place heads": (compile_place_heads, 16, 4, 256, 32, True, bf16),  # Qwen3.5 9B
        "place heads, copy": (compile_place_heads, 0, 1, 8 * 128, 0, False, bf16),  # Nemotron-H 8B
        "place heads, odd": (compile_place_heads, 6, 2, 33, 8, True, fp32),
    }
    cases |= {f"gate_mul {gelu}": (compile_gate_mul, bf16, bf16, gelu) for gelu in (False, True)}
    cases |= {"gate_mul of a scan": (compile_gate_mul, bf16, fp32, False)}

    cases |= {
        "routing nano": (compile_routing, 128, 6, 1, True),
        "routing super": (compile_routing, 512, 22, 1, True),
        "routing groups": (compile_routing, 256, 8, 8, True),
        "routing softmax": (compile_routing, 256, 8, 1, False),
        **{f"sort {most}": (compile_sort, *rest) for most, *rest in expert_routing.SORT_BLOCKS},
        "combine": (compile_combine, 2688, 6, True, False),
        "combine latent": (compile_combine, 1024, 22, False, False),
        "combine gate": (compile_combine, 2048, 8, True, True),
    }
    for pairs in (4 * 6, 512 * 6, 8192 * 6):  # a token of the batch, all its tokens, a prompt
        cases |= {
            f"experts {pairs} nano up": (compile_grouped, pairs, 128, 2688, 1856, bf16, True),
            f"experts {pairs} nano down": (compile_grouped, pairs, 128, 1856, 2688, bf16, False),
            f"experts {pairs} super up": (compile_grouped, pairs, 512, 1024, 2688, bf16, True),
            f"experts {pairs} gated": (compile_grouped, pairs, 256, 2048, 512, bf16, True, True),
            f"experts {pairs} small": (compile_grouped, pairs, 8, 256, 96, fp32, True),
        }
    solve = gated_delta_chunk_solve.gated_delta_chunk_solve_kernel
    scan = gated_delta_chunk_scan.gated_delta_chunk_scan_kernel
    cases |= {
        "delta solve": (compile_delta, solve, 16, 32, 128, 128, bf16),
        "delta scan": (compile_delta, scan, 16, 32, 128, 128, bf16),
        "delta scan of 16 bit": (compile_delta, scan, 16, 32, 128, 128, bf16, bf16),
        "delta small solve": (compile_delta, solve, 3, 6, 10, 12, fp32),
        "delta small scan": (compile_delta, scan, 3, 6, 10, 12, fp32),
    }
    kernels, failed = {}, {}
    for name, (function, *arguments) in cases.items():
        if not name.startswith(tuple(sys.argv[1:]) or ""):
            continue
        try:
            compiled = function(*arguments)
        except Exception as error:  # any: the report names it
            failed[name] = repr(error)[:500]
            continue
        ptx = compiled.asm["ptx"]
        kernels[name] = {
            "shared": compiled.metadata.shared,
            "wgmma": len(re.findall("wgmma.mma_async", ptx)),
            "mma": len(re.findall(r"mma\.sync", ptx)),
            "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4|cp\.async\.cg[^;]*0x10", ptx)),
            "narrow_copies": len(re.findall(r"cp\.async\.ca", ptx)),
            "waits": ptx.count("griddepcontrol.wait"),
        }
    print(json.dumps({"kernels": kernels, "failed": failed}))


if __name__ == "__main__":
    main()
