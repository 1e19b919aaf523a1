# SPDX-License-Identifier: Apache-2.0
"""Parts of tools/reproduce.py: the paper's figures, sample masks, and one module a group of tables."""
