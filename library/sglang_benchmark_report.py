#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Documentation of the action of the same name; nothing runs on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_benchmark_report
short_description: Say which configuration a benchmark found best
description:
  - Prints the comparison of the newest runs of each candidate, and the conclusions, and writes them as one page of HTML
    with plots, and each plot by itself as SVG and PNG.
  - Runs on the controller and needs no connection to the host.
options:
  folder:
    description: Folder with the results; C(index.html) and the images are written there too.
    type: path
    required: true
  hosts:
    description: Hosts whose results count; empty for all.
    type: list
    elements: str
    default: []
  objective:
    description: "What the best is best at: latency, throughput, {concurrency: N} or {ttft_p99_ms: X}."
    type: raw
    default: throughput
attributes:
  check_mode:
    support: none
    description: Reads results and writes the page in any mode.
  diff_mode:
    support: none
    description: Changes nothing on hosts.
  platform:
    platforms: posix
    support: full
    description: Any controller.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Report
  sglang_benchmark_report:
    folder: reports/benchmark
    objective: {concurrency: 32}
  run_once: true
"""

RETURN = r"""
answers:
  description:
    - One entry a release and model that was measured, the newest first - C(best) (null where there is none, then C(why)
      says what is missing), C(tie), C(next), C(margin), C(margin_percent), C(noise), C(ranking), C(overlay).
  returned: success
  type: list
  elements: dict
speculation:
  description:
    - For each of these, per profile measured with and without a drafter, the concurrencies where it C(hurts) or
      C(helps).
  returned: success
  type: list
  elements: list
page:
  description: The page.
  returned: success
  type: path
"""
