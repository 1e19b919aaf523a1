# SPDX-License-Identifier: Apache-2.0
"""The figures of the FlashMask-3 paper's eight tables, as numbers (means; spreads left out)."""

from __future__ import annotations

# Table 1. 118B-A14B MoE, 128K, context parallel 16, 128 H100: tokens/s/GPU, and attention gain in percent.
# Row name here: our strategy that does the same -> {sparsity: (tokens/s/GPU, attention gain)}.
TABLE_1 = {
    "dual_chunk_allgather": {70: (712.6, 0.0), 80: (753.3, 0.0), 86: (812.4, 0.0)},
    "balance_only": {70: (732.2, 10.4), 80: (786.2, 19.1), 86: (858.5, 10.5)},
    "overlap_only": {70: (750.8, 15.9), 80: (785.0, 13.9), 86: (860.0, 20.5)},
    "fm3_no_hierarchy": {70: (700.6, 8.4), 80: (742.0, 21.5), 86: (828.0, 23.2)},
    "fm3_no_pruning": {70: (750.0, 20.5), 80: (788.4, 25.4), 86: (888.6, 27.9)},
    "fm3": {70: (764.7, 24.5), 80: (811.4, 42.1), 86: (902.1, 44.9)},
}
TABLE_1_LABELS = {
    "dual_chunk_allgather": "Dual Chunk + all-gather",
    "balance_only": "+ balancing",
    "overlap_only": "+ mask-aware overlap",
    "fm3_no_hierarchy": "+ both, hierarchical routing off",
    "fm3_no_pruning": "+ both, without pruning",
    "paper": "+ both, the paper's own planner",
    "fm3": "+ both",
}

# Table 3. row -> (N, P, kappa, w_max, instances), and per algorithm (worse than the best found %, largest gap %).
TABLE_3_SETTINGS = {
    "64_16_4_1e3": (64, 16, 4, 10**3, 200),
    "64_16_4_1e4": (64, 16, 4, 10**4, 200),
    "64_8_8_200": (64, 8, 8, 200, 200),
    "128_16_8_200": (128, 16, 8, 200, 100),
}
TABLE_3 = {
    "64_16_4_1e3": {"lpt": (99.0, 6.54), "p2": (86.0, 6.29), "p3": (0.0, None)},
    "64_16_4_1e4": {"lpt": (100.0, 8.67), "p2": (93.5, 3.42), "p3": (0.0, None)},
    "64_8_8_200": {"lpt": (93.5, 2.51), "p2": (53.5, 1.39), "p3": (0.0, None)},
    "128_16_8_200": {"lpt": (85.0, 1.08), "p2": (48.0, 0.79), "p3": (0.0, None)},
}

# Table 4. (baseline, scope) -> improvement in percent: least, most, mean.
TABLE_4 = {
    ("flex", "all"): (33.6, 70.5, 55.3),
    ("flex", "8k"): (33.6, 62.9, 50.6),
    ("flex", "128k"): (51.9, 70.0, 58.9),
    ("magi", "all"): (2.0, 44.1, 15.0),
    ("magi", "8k"): (12.0, 44.1, 25.0),
    ("magi", "128k"): (2.0, 8.9, 5.9),
    ("flashmask_v1", "all"): (44.9, 140.5, 82.6),
    ("flashmask_v1", "8k"): (44.9, 84.8, 66.2),
    ("flashmask_v1", "128k"): (74.4, 140.5, 97.3),
}

# Table 5. (baseline, phase) -> speedup: least, most, geometric mean.
TABLE_5 = {
    ("magi", "fwd"): (1.04, 2.39, 1.56),
    ("magi", "bwd"): (1.10, 1.19, 1.15),
    ("magi", "total"): (1.09, 1.46, 1.26),
    ("ring", "fwd"): (1.62, 4.12, 2.50),
    ("ring", "bwd"): (1.86, 3.57, 2.38),
    ("ring", "total"): (1.80, 3.71, 2.42),
    ("dual_chunk_allgather", "fwd"): (1.31, 2.24, 1.57),
    ("dual_chunk_allgather", "bwd"): (1.85, 3.15, 2.21),
    ("dual_chunk_allgather", "total"): (1.71, 2.92, 2.05),
}

# Table 6. case -> forward + backward TFLOP/s of FA3, FlashMask-3, FlexAttention, MagiAttention.
TABLE_6_IMPLS = ("fa3", "flashmask_v3", "flex", "magi")
TABLE_6 = {
    "8k_full": (604.43, 569.84, 394.15, 513.66),
    "8k_causal": (579.73, 520.85, 341.68, 482.17),
    "8k_window": (407.23, 290.30, 218.93, 166.22),
    "8k_causal_document": (478.96, 377.86, 264.06, 247.92),
    "8k_document": (546.29, 460.49, 299.46, 352.82),
    "32k_full": (616.65, 603.63, 408.22, 593.40),
    "32k_causal": (611.66, 587.87, 371.48, 563.30),
    "32k_window": (534.47, 465.00, 309.52, 378.13),
    "32k_causal_document": (532.68, 435.54, 294.92, 328.81),
    "32k_document": (592.03, 503.66, 312.10, 431.37),
    "128k_full": (603.12, 602.06, 415.16, 595.04),
    "128k_causal": (618.52, 587.92, 377.21, 580.09),
    "128k_window": (592.51, 561.46, 358.07, 514.87),
    "128k_causal_document": (591.87, 542.68, 352.92, 498.60),
    "128k_document": (615.62, 575.86, 367.07, 546.12),
}

# Table 7. case -> forward TFLOP/s of FlashMask-3, FlashMask, and an FA3-style port without the index generator.
TABLE_7_IMPLS = ("flashmask_v3", "flashmask_v1", "plain_port")
TABLE_7 = {
    "8k_full": (596.53, 384.88, 214.01),
    "8k_causal": (553.31, 373.46, 241.86),
    "8k_window": (432.15, 256.63, 35.77),
    "8k_causal_document": (483.97, 302.03, 64.77),
    "8k_document": (532.26, 287.89, 55.03),
    "32k_full": (614.19, 388.92, 214.22),
    "32k_causal": (593.97, 379.46, 244.95),
    "32k_window": (553.66, 274.60, 31.20),
    "32k_causal_document": (515.48, 256.39, 25.29),
    "32k_document": (544.56, 191.12, 21.42),
    "128k_full": (613.49, 390.66, 211.51),
    "128k_causal": (544.83, 359.79, 245.99),
    "128k_window": (573.63, 274.44, 29.96),
    "128k_causal_document": (554.50, 252.96, 22.15),
    "128k_document": (577.55, 217.27, 18.97),
}

# Table 8. mask -> attention ms, scheduling ms (P = 32, 256K tokens, chunk 2048).
TABLE_8 = {"causal_document": (35.08, 42.75), "document": (67.44, 23.52), "prefix_document": (35.84, 43.71)}
