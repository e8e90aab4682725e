#!/usr/bin/python
"""Ansible module: what happened to a unit that died, hung or only seems alive."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: journal_crash
short_description: Say what happened to an engine that died, hung or only seems alive
description:
  - Reads the journal of one run of a systemd unit and returns, as data, how it ended, which process failed first, the
    whole exception, what the kernel saw, the cause, and remedies that are right for the installed release.
  - Works on the journal of the host, on a C(.journal) file, and on a file of C(journalctl -o json) or C(-o export)
    output, so that a journal that a colleague sent can be read on any machine.
  - Changes nothing. Keys and tokens in logged arguments are redacted in everything that is returned.
  - Needs the right to read the journal (root, or group systemd-journal). Memory and time are bounded, whatever the unit
    printed.
options:
  unit:
    description:
      - The unit, with or without C(.service).
      - Without it, O(journal_file) is required and the unit that failed last in it is taken.
    type: str
  invocation_id:
    description: The run to look at. The default is the newest one that ended or, if none did, the current one.
    type: str
  journal_file:
    description:
      - A C(.journal) file, a directory of them, or exported text (C(journalctl -o json) or C(-o export), also
        gzip-compressed).
      - Export whole fields with C(journalctl --all), else long lines are missing.
    type: path
  engine_version:
    description: Release of the engine, for remedies. The default is found on the host from the run's own command.
    type: str
  in_effect:
    description:
      - The project's variables of that run, for example C(sglang_cuda_graph).
      - What is in effect is not offered as a remedy.
    type: dict
    default: {}
  causes:
    description:
      - Rows of your own, tried before the built-in ones, see docs/causes.md.
      - Each has C(id), C(cause) and one of C(pattern), C(type), C(frames), C(raised_in), all regular expressions.
    type: list
    elements: dict
    default: []
  report:
    description: Also return RV(report), the finding as readable text.
    type: bool
    default: false
attributes:
  check_mode:
    description: The module only reads.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Needs systemd.
    platforms: posix
    support: full
author:
  - dflash-fleet (@dflash-fleet)
"""

EXAMPLES = r"""
- name: Ask why the engine died
  journal_crash:
    unit: sglang-main-ep8
  register: crash

- name: Show it
  ansible.builtin.debug:
    msg: "{{ crash.headline }}"

# By hand, on every host:
#   ansible gpu -m journal_crash -a unit=sglang-main-ep8 --become
# A journal that somebody sent:
#   ansible localhost -m journal_crash -a journal_file=./crash.journal
"""

RETURN = r"""
crash:
  description:
    - The whole finding, the keys below, as one dictionary. Use this one in playbooks.
    - Ansible takes a top-level key RV(exception) for a traceback of the module itself, so a registered result has it
      only in here.
  type: dict
  returned: always
verdict:
  description: >-
    One of crashed, crashed_exit_zero, hung, running_but_dead, startup_timeout, stopped_by_operator, running, starting,
    no_evidence.
  type: str
  returned: always
cause:
  description: One of the causes in docs/causes.md; C(unknown) where no rule fits, C(none) where nothing failed.
  type: str
  returned: always
summary:
  description: One sentence that a person can act on.
  type: str
  returned: always
headline:
  description: The text for a person, several lines.
  type: str
  returned: always
report:
  description: The finding as readable text.
  type: str
  returned: when O(report) is true
phase:
  description: Where the run was; launch, dist_init, weights, kv_cache, graph_capture, warmup, serving or stopping.
  type: str
  returned: always
exception:
  description: >-
    The root exception of the process that failed first, whole, or null. C(chain) holds every link, the root first,
    wrappers after. C(frames) are outermost first.
  type: dict
  returned: always
  contains:
    type:
      description: Its type as printed; null where the log lost it.
      type: str
    message:
      description: Its message, all lines.
      type: str
    chain:
      description: Every exception of the chain, root first, each with type and message.
      type: list
    frames:
      description: Frames of the root, each with file, line and function.
      type: list
native_fault:
  description: The signal that native code died of (signal, number, description), or null.
  type: dict
  returned: always
root_frame:
  description: Where the first failing process raised, or null.
  type: dict
  returned: always
first_failure:
  description: Who failed first (rank, pid, process, at); null where the log cannot tell, C(rank) null with one rank.
  type: dict
  returned: always
ranks_failed:
  description: Ranks that reported a failure, in order.
  type: list
  elements: str
  returned: always
exit:
  description: >-
    How the main process ended (code, status, result), null while it runs. C(self_inflicted) is true where the engine
    ended itself by SIGKILL.
  type: dict
  returned: always
kernel:
  description: What the kernel said about these processes (oom_killed, xid, segfault).
  type: dict
  returned: always
complete:
  description: False where journald dropped, cut or rotated evidence away.
  type: bool
  returned: always
gaps:
  description: What is missing and how much.
  type: list
  elements: str
  returned: always
remedies:
  description: What to do, best first, each with id, summary, set (variables of this project), cost, source, automatic.
  type: list
  elements: dict
  returned: always
evidence:
  description: The journal lines that carry the verdict, each with cursor, at, pid, source, message.
  type: list
  elements: dict
  returned: always
unit:
  description: The unit.
  type: str
  returned: always
invocation_id:
  description: The run.
  type: str
  returned: always
engine:
  description: Name and version of the engine; the version is null where it is not known.
  type: dict
  returned: always
"""

import socket

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import causes, diagnosis, journal, runfacts


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str"},
            "invocation_id": {"type": "str"},
            "journal_file": {"type": "path"},
            "engine_version": {"type": "str"},
            "in_effect": {"type": "dict", "default": {}},
            "causes": {"type": "list", "elements": "dict", "default": []},
            "report": {"type": "bool", "default": False},
        },
        required_one_of=[["unit", "journal_file"]],
        supports_check_mode=True,
    )
    params = module.params
    unit = journal.unit_name(params["unit"] or "")
    try:
        collected = journal.collect(unit, params["invocation_id"], params["journal_file"] or "")
        version, in_effect = params["engine_version"], dict(params["in_effect"] or {})
        if not params["journal_file"]:
            version = version or runfacts.installed_version(collected.entries)
            in_effect.update(runfacts.unit_limits(collected.unit))
        result = diagnosis.diagnose_collected(
            collected, engine_version=version, in_effect=in_effect, extra_causes=params["causes"]
        )
    except (journal.JournalError, causes.CauseError) as error:
        module.fail_json(msg=str(error))
    host = "" if params["journal_file"] else socket.gethostname()
    more = {"headline": diagnosis.headline(result, host)}
    if params["report"]:
        more["report"] = diagnosis.report_text(result, host)
    module.exit_json(changed=False, crash=result, **result, **more)


if __name__ == "__main__":
    main()
