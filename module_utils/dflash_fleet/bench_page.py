"""A benchmark as one page of HTML that needs nothing else, with plots by matplotlib. Made on the controller only."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import bench_report, choice

# Of the palette of Okabe and Ito, which colour-blind people can tell apart; lines differ by marker too, for print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#999999")
MARKERS = "osD^vPX*"

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } section + section { border-top: 4px solid #ccc; margin-top: 2rem; }
h2 { font-size: 1.15rem; margin: 1.75rem 0 .5rem; }
.rehearsal { border: 2px solid #d55e00; padding: .5rem .75rem; font-weight: 600; }
.facts { color: #555; margin: 0; } ul { padding-left: 1.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.note { text-align: left; } tr.best td { font-weight: 700; background: #eaf4fb; }
figure { margin: 0 0 1.25rem; break-inside: avoid; }
figure svg { width: 100%; height: auto; max-width: 44rem; overflow: visible; }
details { margin-top: 1.5rem; } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
@media print { body { max-width: none; font-size: 11pt; } .scroll { overflow: visible; } table { font-size: 8pt; } }
"""


def _mean(records: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> float | None:
    values = [float(value) for value in map(read, records) if value is not None]
    return statistics.fmean(values) if values else None


def series(
    curves: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]
) -> dict[str, list[tuple[int, float]]]:
    """By candidate the points of one figure; candidates without any are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for curve in curves:
        pairs = [(point, _mean(records, read)) for point, records in curve["points"].items()]
        points = [(point, value) for point, value in pairs if value is not None]
        if points:
            found[curve["name"]] = points
    return found


def _of(name: str, statistic: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda record: (record.get(name) or {}).get(statistic)


#: (name, title, axis, how a record says it, logarithmic)
PLOTS: tuple[tuple[str, str, str, Callable[[Mapping[str, Any]], Any], bool], ...] = (
    ("throughput", "Throughput", "tokens per second", lambda record: record["output_throughput"], False),
    ("per_request", "Speed of one request, median", "tokens per second", _of("request_tps", "p50"), True),
    ("ttft", "Time to first token, 99th percentile", "milliseconds", _of("ttft_ms", "p99"), True),
    ("itl", "Time between tokens, median", "milliseconds", _of("itl_ms", "p50"), True),
    ("e2e", "Whole request, 99th percentile", "milliseconds", _of("e2e_ms", "p99"), True),
    ("accept", "Accept length", "tokens per verify", lambda record: record["accept_length"], False),
)


def plots(
    records: Sequence[Mapping[str, Any]], formats: Sequence[str] = ("svg",), salt: str = ""
) -> dict[str, dict[str, bytes]]:
    """Images of one group by name and format. ImportError where there is no matplotlib.

    `salt` keeps the ids of several groups on one page apart.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    curves = choice.curves(records)
    mark = "  [rehearsal]" if any(curve["rehearsal"] for curve in curves) else ""
    style = {curve["name"]: index for index, curve in enumerate(curves)}
    found: dict[str, dict[str, bytes]] = {}
    # Text stays text: it can be read aloud, searched, and printed sharp.
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 12}):
        for name, title, axis, read, logarithmic in PLOTS:
            lines = series(curves, read)
            if lines:
                figure = Figure(figsize=(6.4, 4.4), layout="constrained")
                axes = figure.subplots()
                for label, points in lines.items():
                    index = style[label]
                    axes.plot(
                        *zip(*points), label=label, color=COLOURS[index % len(COLOURS)],
                        marker=MARKERS[index % len(MARKERS)], markersize=5, linewidth=1.6,
                    )  # fmt: skip
                ticks = sorted({point for points in lines.values() for point, _ in points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [str(tick) for tick in ticks])
                if logarithmic:
                    axes.set_yscale("log")
                    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                    axes.yaxis.set_major_formatter(ScalarFormatter())
                    axes.yaxis.set_minor_formatter(NullFormatter())
                else:
                    axes.set_ylim(bottom=0)
                axes.set(title=title + mark, xlabel="requests under way at a time", ylabel=axis)
                axes.grid(True, alpha=0.3)
                axes.legend(fontsize=11, frameon=False)
                found[name] = _images(figure, salt + name, formats)
        memory = memory_of(curves)
        if memory:
            figure = Figure(figsize=(6.4, 1.1 + 0.45 * len(memory)), layout="constrained")
            axes = figure.subplots()
            names = list(memory)[::-1]
            axes.barh(names, [memory[one] / 1000 for one in names], color=[COLOURS[style[one] % 8] for one in names])
            axes.set(title="KV pool" + mark, xlabel="thousand tokens")
            axes.grid(True, axis="x", alpha=0.3)
            found["memory"] = _images(figure, salt + "memory", formats)
    return found


def memory_of(curves: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Tokens of the KV pool by candidate, where its log said so."""
    found = {}
    for curve in curves:
        sizes = [
            record["engine_log"]["kv_tokens"]
            for records in curve["points"].values()
            for record in records
            if (record.get("engine_log") or {}).get("kv_tokens")
        ]
        if sizes:
            found[curve["name"]] = min(sizes)
    return found


def _images(figure: Any, name: str, formats: Sequence[str]) -> dict[str, bytes]:
    import matplotlib

    images = {}
    for kind in formats:
        out = io.BytesIO()
        # The salt keeps ids of several images of one page apart, and the same in every run.
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        images[kind] = out.getvalue()
    return images


def inline(svg: bytes, title: str) -> str:
    """An image as part of a page, with a name for those who cannot see it."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title, quote=True)}" ', 1)


def table(curves: Sequence[Mapping[str, Any]], best: str | None) -> str:
    """The comparison, with every concurrency."""
    points = sorted({point for curve in curves for point in curve["points"]})
    heads = ["configuration", *(f"C={point}" for point in points), "peak", "accept", "TTFT p99 at peak", "note"]
    keys = ["name", *(f"c{point}" for point in points), "peak", "accept", "ttft", "note"]
    lines = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    for row in bench_report.rows(curves, points):
        cells = "".join(
            f"<td{' class=note' if key == 'note' else ''}>{html.escape(str(row.get(key) or ''))}</td>" for key in keys
        )
        lines.append(f"<tr{' class=best' if row['name'] == best else ''}>{cells}</tr>")
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def facts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was measured where."""
    first = records[0]
    engine, model, drafter = first["engine"], first["model"], None
    for record in records:
        drafter = drafter or record.get("drafter_model")
    gpus = sorted({f"{r['gpus']} x {r['gpu']}, driver {r['driver']}" for r in records if r.get("gpu")})
    lines = [
        f"SGLang {engine['version']} ({engine['build']})",
        f"model {model.get('name')} {str(model.get('revision'))[:12]}",
        *([f"drafter {drafter['name']} {str(drafter['revision'])[:12]}"] if drafter else []),
        "hosts " + ", ".join(sorted({record["host"] for record in records})),
        *gpus,
        f"measured {min(record['run'] for record in records)} to {max(record['at'] for record in records)[:19]}Z",
    ]
    issues = sorted({issue for record in records for issue in record["known_issues"]})
    return lines + ([f"known issues {', '.join(issues)}"] if issues else [])


def page(
    groups: Sequence[Sequence[Mapping[str, Any]]], wanted: Any, images: Sequence[Mapping[str, Mapping[str, bytes]]]
) -> str:
    """The whole page: a section for each group of results that can be compared, with its images."""
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', '<link rel="icon" href="data:,">',
        "<title>Which configuration to run</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
        "<h1>Which configuration to run</h1>",
    ]  # fmt: skip
    for records, drawn in zip(groups, images):
        parts += section(records, wanted, drawn)
    return "\n".join([*parts, "</body>", "</html>"]) + "\n"


def section(records: Sequence[Mapping[str, Any]], wanted: Any, images: Mapping[str, Mapping[str, bytes]]) -> list[str]:
    """What one group of results says."""
    curves = choice.curves(records)
    answer = choice.choose(records, wanted)
    titles = {name: title for name, title, *_ in PLOTS}
    parts = ["<section>"]
    if any(curve["rehearsal"] for curve in curves):
        parts.append(f'<p class="rehearsal">{html.escape(bench_report.REHEARSAL)}</p>')
    parts += [f'<p class="facts">{html.escape(line)}</p>' for line in facts(records)]
    parts.append("<h2>Answer</h2><ul>")
    parts += [f"<li>{html.escape(line)}</li>" for line in bench_report.conclusions(records, wanted)]
    parts += ["</ul>", "<h2>Tokens per second by requests at a time</h2>", table(curves, answer["best"])]
    if images:
        parts.append("<h2>Plots</h2>")
        parts += [
            f"<figure>{inline(image['svg'], titles.get(name, 'KV pool'))}</figure>" for name, image in images.items()
        ]
    parts.append("<details><summary>Arguments of each configuration</summary>")
    for curve in curves:
        first = next(record for record in records if record["candidate"] == curve["name"])
        words = " ".join(first["arguments"][2:]).replace(" --", "\n--")
        parts.append(f"<h3>{html.escape(curve['name'])}</h3><pre>{html.escape(words)}</pre>")
    return [*parts, "</details>", "</section>"]
