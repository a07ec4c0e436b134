"""One-line bugs for a copy of kernels_cu, by the part of the kernels that they break.

Each is a mistake that was made somewhere, or that a tired author would make. test_seeded_bugs.py compiles each and expects
a wrong result or a fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """Replace `old`, which stands exactly once in `file`, by `new`; `kernel` is the one that must fail."""

    part: str
    name: str
    kernel: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.part}-{self.name}"


ATTENTION = "attention_mxfp4_bf16"
PRODUCT = "attention_bf16"

BUGS = [
    # The quantizers and their inverses
    Bug("quantizer", "scale_exponent_off_by_one", "quantize_mxfp4", "tile/scale.cuh",
        "max(exponent - (rceil ? 0 : Format::max_exponent), 0)", "max(exponent - (rceil ? 0 : Format::max_exponent) - 1, 0)"),
    Bug("quantizer", "amax_drops_nan", "quantize_mxfp4", "ptx/math.cuh",
        "max.NaN.f32", "max.f32"),
    Bug("quantizer", "amax_of_half_a_block", "quantize_mxfp4", "tile/run.cuh",
        "mask < lanes; mask *= 2) of_lane = ptx", "mask < lanes / 2; mask *= 2) of_lane = ptx"),
    Bug("quantizer", "swapped_nibbles", "quantize_mxfp4", "ptx/cvt.cuh",
        "cvt.rn.satfinite.e2m1x2.f32 pair0, %2, %1", "cvt.rn.satfinite.e2m1x2.f32 pair0, %1, %2"),
    Bug("quantizer", "neighbours_exchange_the_wrong_half", "quantize_mxfp6_e3m2", "tile/run.cuh",
        "ptx::shfl_sync_bfly_b32(odd ? one : next, 1)", "ptx::shfl_sync_bfly_b32(odd ? next : one, 1)"),
    Bug("quantizer", "tail_scales_past_the_end", "quantize_mxfp4", "tile/run.cuh",
        "if (index < present) run_scales[index] = scale;", "run_scales[index] = scale;"),
    Bug("quantizer", "codes_of_a_block_with_nan", "quantize_mxfp4", "op/quantize.cuh",
        "if (scale == tile::ue8m0_nan) run_codes[item].clear();", ""),
    Bug("quantizer", "scales_stored_for_another_item", "quantize_mxfp4", "tile/run.cuh",
        "(first + part) * item_blocks + in_item", "(first + lanes - 1 - part) * item_blocks + in_item"),
    Bug("quantizer", "dequantizer_takes_the_scale_next_door", "dequantize_mxfp4", "op/quantize.cuh",
        "scales + first / block + at / block", "scales + first / block + at / (2 * block)"),
    Bug("quantizer", "round_up_ignores_the_mantissa", "quantize_mxfp4", "tile/scale.cuh",
        "rule == ScaleRule::ceil ? 0x7fffffu", "rule == ScaleRule::ceil ? 0u"),
    Bug("quantizer", "columns_exchanged", "quantize_mxfp4_columns", "tile/columns.cuh",
        "{columns[0].word[i], columns[1].word[i],", "{columns[1].word[i], columns[0].word[i],"),
    Bug("quantizer", "global_scale_left_out", "quantize_nvfp4", "tile/scale.cuh",
        "step = global_scale * value;\n    }", "step = value;\n    }"),
    Bug("quantizer", "sixth_instead_of_fourth", "quantize_nvfp4", "tile/scale.cuh",
        "plain_sixth(amax) : amax * 0.25f", "plain_sixth(amax) : amax * 0.2f"),

    # Loads: copies, barriers, conversions, fragments
    Bug("loads", "waits_for_too_few_groups", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "ptx::cp_async_wait_group<1>();", "ptx::cp_async_wait_group<2>();"),
    Bug("loads", "no_barrier_before_codes_are_read", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "ptx::bar_sync();   // the codes of K are complete; nobody reads K as it came any more\n"
        "        if (tile_index", "if (tile_index"),
    Bug("loads", "no_barrier_before_queries_are_overwritten", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "ptx::bar_sync();   // all warps have their fragments before K is copied over Q", ""),
    Bug("loads", "copies_every_other_chunk", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "i < Tile::rows * Tile::row_chunks; i += attention_threads",
        "i < Tile::rows * Tile::row_chunks; i += 2 * attention_threads"),
    Bug("loads", "reads_one_row_past_the_end", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "const bool present = first + row < valid;", "const bool present = first + row <= valid;"),
    Bug("loads", "wrong_k_stride", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "tile::load_b(b, k.codes, 32 * group + 16 * pair, 2 * step)",
        "tile::load_b(b, k.codes, 32 * group + 16 * pair, step)"),
    Bug("loads", "converted_values_out_of_order", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "values[part * (8 / parts) + j] = some[j]", "values[(parts - 1 - part) * (8 / parts) + j] = some[j]"),

    # MMA and scale wiring
    Bug("mma", "scale_of_the_wrong_query_row", ATTENTION, "tile/scale.cuh",
        "first_row + group + 8 * (thread % 2)", "first_row + group + 8 * (thread / 2)"),
    Bug("mma", "scale_of_the_wrong_key", ATTENTION, "tile/scale.cuh",
        "first_row + 8 * thread + group", "first_row + 4 * group + thread"),
    Bug("mma", "selector_names_another_key_tile", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "byte, word % 2, byte, thread>", "byte, word % 2, byte, 2 * half + pair>"),
    Bug("mma", "selector_names_another_block", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "byte, word % 2, byte, thread>", "byte, word % 2, 0, thread>"),
    Bug("mma", "scales_shifted_into_the_wrong_byte", ATTENTION, "tile/scale.cuh",
        "scale << (8 * block(pass))", "scale << (8 * (pass_blocks - 1 - block(pass)))"),
    Bug("mma", "probabilities_with_rows_swapped", ATTENTION, "tile/fragment.cuh",
        "a[1] = rounded_pair(left[3], left[2], Element{});", "a[1] = rounded_pair(left[2], left[3], Element{});"),
    Bug("mma", "containers_two_bits_low", ATTENTION, "tile/scale.cuh",
        "odd = codes >> 2 & 0x3c3c3c3cu", "odd = codes >> 4 & 0x0f0f0f0fu"),
    Bug("mma", "rate_of_one_fragment_that_changes", "mma_rate_bf16", "op/mma_rate.cuh",
        "for (uint32_t &word : left[i]) word ^= flip;", "for (uint32_t &word : left[0]) word ^= flip;"),
    Bug("mma", "rate_with_a_column_of_b_twice", "mma_rate_bf16", "op/mma_rate.cuh",
        "right[j / 2][j % 2]", "right[j / 2][0]"),
    Bug("loads", "rate_before_the_tiles_are_complete", "mma_rate_bf16", "op/mma_rate.cuh",
        "ptx::bar_sync();   // both tiles are complete", "// both tiles are complete"),

    # Mask and softmax
    Bug("softmax", "mask_off_by_one", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "if (key >= visible_keys(", "if (key > visible_keys("),
    Bug("softmax", "causal_aligned_at_the_top", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "min(keys, row + keys - queries + 1)", "min(keys, row + 1)"),
    Bug("softmax", "masked_tiles_start_too_late", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "if (first_key + keys_per_tile > unmasked_keys) {", "if (first_key > unmasked_keys) {"),
    Bug("softmax", "last_partial_tile_dropped", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "ceil_div(max(visible_keys(last_query, queries, keys, causal), 0), keys_per_tile)",
        "max(visible_keys(last_query, queries, keys, causal), 0) / keys_per_tile"),
    Bug("softmax", "output_not_rescaled", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "accumulator[i] *= rescale[i / 2];", "accumulator[i] *= 1.0f;"),
    Bug("softmax", "sum_not_rescaled", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "row_sum[half] *= rescale[half];", ""),
    Bug("softmax", "maximum_not_reduced_over_the_quad", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "tile_max = tile::reduce_row(tile_max, [](float a, float b) { return fmaxf(a, b); });", ""),
    Bug("softmax", "sum_not_reduced_over_the_quad", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "softmax.finish();", ""),
    Bug("softmax", "no_guard_for_rows_without_keys", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "base[half] = new_max == -INFINITY ? 0.0f : new_max;", "base[half] = new_max;"),
    Bug("softmax", "lse_in_base_two", ATTENTION, "op/attention_mxfp4_bf16.cuh",
        "ptx::lg2_approx_ftz_f32(sum) * ln_2;", "ptx::lg2_approx_ftz_f32(sum);"),

    # Windows, groups, sequences, splits and sinks
    Bug("options", "window_too_narrow_on_the_left", PRODUCT, "op/problem.cuh",
        "max(query + offset - options.left, 0)", "max(query + offset - options.left + 1, 0)"),
    Bug("options", "window_too_narrow_on_the_right", PRODUCT, "op/problem.cuh",
        "min(query + offset + options.right + 1, keys)", "min(query + offset + options.right, keys)"),
    Bug("options", "windows_aligned_at_the_top", PRODUCT, "op/problem.cuh",
        "offset = keys - queries;", "offset = 0;"),
    Bug("options", "heads_of_a_group_exchanged", PRODUCT, "op/problem.cuh",
        "return options.group == 1 ? 0 : row % options.group;", "return options.group == 1 ? 0 : (row + 1) % options.group;"),
    Bug("options", "key_lengths_ignored", PRODUCT, "op/problem.cuh",
        "(options.key_ends ? options.key_ends[sequence] : options.keys)", "options.keys"),
    Bug("options", "packed_sequences_start_at_zero", PRODUCT, "op/problem.cuh",
        "first_key = options.key_starts ? options.key_starts[sequence] : 0;", "first_key = 0;"),
    Bug("options", "softcap_is_no_bound", PRODUCT, "op/attention.cuh",
        "score = options.softcap * (1.0f", "score = (1.0f"),
    Bug("options", "splits_overlap", PRODUCT, "op/problem.cuh",
        "min(split_begin + split_keys, problem.keys)", "problem.keys"),
    Bug("options", "a_sink_in_every_split", PRODUCT, "op/attention.cuh",
        "if (options.sinks && problem.split == 0) {", "if (options.sinks) {"),
    Bug("options", "maximum_not_whole", PRODUCT, "op/softmax.cuh",
        "? ceilf(max) : row_max[slice][half]", "? max : row_max[slice][half]"),
    Bug("options", "sums_not_brought_under_a_new_maximum", PRODUCT, "op/softmax.cuh",
        "row_sum[slice][half] *= factor;", ""),

    # Merging and converting
    Bug("around", "segments_merged_without_their_sums", "attention_merge", "op/merge.cuh",
        "segments.row_sum ? segments.row_sum[at] : 1.0f", "1.0f"),
    Bug("around", "natural_maxima_taken_for_powers_of_two", "attention_merge", "op/merge.cuh",
        "segments.natural ? exp_f32(max - top)", "segments.natural ? ptx::ex2_approx_ftz_f32(max - top)"),
    Bug("around", "merged_lse_in_base_two", "attention_merge", "op/merge.cuh",
        "segments.natural ? fmaf(log2_total, ln_2, top)", "segments.natural ? log2_total + top"),
    Bug("around", "segments_have_the_width_of_the_output", "attention_merge", "op/merge.cuh",
        "segments.partial + at * segments.width + column", "segments.partial + at * segments.dim_v + column"),
    Bug("around", "filled_up_with_the_next_row", "cast", "op/cast.cuh",
        "first + i < cols ? float(source[i * x.column]) : 0.0f", "first + i < width ? float(source[i * x.column]) : 0.0f"),

    # Operands: what is read first, and packing
    Bug("operands", "mean_added", "pack_keys_mxfp4", "op/pack.cuh",
        "values[group][i] -= mean_values[group][i];", "values[group][i] += mean_values[group][i];"),
    Bug("operands", "scales_of_keys_that_are_not_there", "pack_keys_mxfp4", "op/pack.cuh",
        "rows.holds(row, Packing::first_of_block()) ? scale : Encoder::one", "scale"),
    Bug("operands", "rows_of_a_tile_swizzled_alike", "pack_keys_mxfp4", "tile/block_tiles.cuh",
        "return (near ^ far) & (swizzled_chunks - 1);", "return (near | far) & (swizzled_chunks - 1);"),
    Bug("operands", "bytes_behind_the_last_scale_left_out", "pack_keys_mxfp4", "tile/packing.cuh",
        "i < 4 * Tile::words; ++i) scales[i] = 0;", "i < 4 * Tile::words - 1; ++i) scales[i] = 0;"),
    Bug("operands", "rows_off_16_bytes_taken_whole", "pack_keys_mxfp4", "tile/rows.cuh",
        "aligned(cols % 8 == 0 && ", "aligned("),
    Bug("operands", "scales_of_columns_in_one_byte", "pack_values_nvfp4", "tile/block_tiles.cuh",
        "byte = j / 4 % columns_per_word * step_blocks + block % step_blocks;", "byte = j / 4 % columns_per_word * step_blocks;"),
    Bug("operands", "key_ends_ignored", "pack_values_nvfp4", "op/keys.cuh",
        "key_ends ? min(key_ends[batch_of_block()], keys) : keys", "keys"),
    Bug("operands", "values_read_before_they_are_there", "pack_values_nvfp4", "op/pack.cuh",
        "ptx::bar_sync();   // all values are there", ""),
    Bug("operands", "the_worse_of_two_scales", "pack_values_nvfp4", "op/pack.cuh",
        "other_error < error", "other_error > error"),
    Bug("operands", "half_a_column_taken_twice", "pack_values_nvfp4", "tile/packing.cuh",
        "reinterpret_cast<uint2 *>(target)[byte / 8 % 2]", "reinterpret_cast<uint2 *>(target)[0]"),
    Bug("operands", "infinities_counted", "scan_keys", "tile/format.cuh",
        "fabsf(fmaf(value, 0.0f, value))", "fabsf(value)"),
    Bug("operands", "sums_of_all_teams_but_one", "scan_keys", "op/smooth.cuh",
        "for (int i = 0; i < teams; ++i) sum +=", "for (int i = 1; i < teams; ++i) sum +="),
    Bug("operands", "power_of_two_rounded_down", "operand_scale", "op/smooth.cuh",
        "(bits >> 23) + ((bits & 0x7fffffu) != 0)", "(bits >> 23)"),
    Bug("operands", "lanes_of_a_row_not_joined", "row_dot", "op/smooth.cuh",
        "for (int mask = 1; mask < dot_team; mask *= 2) sum +=", "for (int mask = 2; mask < dot_team; mask *= 2) sum +="),
]
