"use strict";
// Everything shown is made with textContent: a log line, a reason or a name is text, whatever stands in it.

const OUTCOMES = {
  failed: ["✗", "failed"], changed: ["≠", "fails in another way than its known-bad entry says"],
  infra: ["⚠", "the machine, not the cell"], blocked: ["⊘", "not judged: its baseline or an earlier check failed"],
  xpassed: ["!", "passed although a known-bad entry expects a failure"], "not-run": ["·", "not reached"],
  xfailed: ["x", "failed as its known-bad entry says"], skipped: ["–", "does not apply here"], passed: ["✓", "passed"],
  rejected: ["✗", "refused by the engine's arguments"], unavailable: ["⚠", "could not be asked"],
  rewritten: ["~", "accepted, but another value is used than was asked"],
  "foretold-failure": ["✗", "accepted by the arguments; a launch is foretold to fail later"],
  accepted: ["○", "accepted by the engine's arguments; nothing was launched"],
};
const ORDER = Object.keys(OUTCOMES);
const state = { data: null, text: "", outcomes: new Set(), differs: false, squares: [], opener: null };

// Control characters and direction marks of foreign text, made visible.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const clean = (text) => String(text).replace(HIDDEN, (mark) =>
  mark < " " ? String.fromCharCode(0x2400 + mark.charCodeAt(0)) : "\ufffd");

function make(tag, content, attributes) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const part of [content].flat(Infinity)) {
    if (part === null || part === undefined || part === "") continue;
    element.append(part instanceof Node ? part : document.createTextNode(clean(part)));
  }
  return element;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (mark) => mark.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const kind = (cell) => cell.failure ? `${cell.failure.kind} in ${cell.failure.phase}` : "";
const sentence = (cell) => cell.failure?.message || cell.reason || cell.rejection?.text || cell.known_bad?.reason || "";

function counts(cells) {
  const found = {};
  for (const cell of cells) found[cell.outcome] = (found[cell.outcome] || 0) + 1;
  return ORDER.filter((name) => found[name]).map((name) => [name, found[name]]);
}

// -- the head ---------------------------------------------------------------------------------------------------------

function drawHead(records) {
  const head = document.getElementById("head");
  const title = records.length === 1
    ? `${records[0].title}: ${counts(records[0].cells).map(([name, count]) => `${count} ${name}`).join(", ") || "no cells"}`
    : `${plural(records.length, "record")} side by side`;
  head.append(make("h1", title));
  if (records.some((record) => record.simulated))
    head.append(make("p", records.every((record) => record.simulated)
      ? "SIMULATED: no GPU and no SGLang were used; times and speeds are invented."
      : "Some of these records are SIMULATED: no GPU and no SGLang were used for them.", { class: "banner" }));
  for (const [number, record] of records.entries()) {
    if (!record.complete)
      head.append(make("p", "INCOMPLETE: the run did not end by itself. What it did not reach is “not-run”.", { class: "banner" }));
    const parts = [];
    if (records.length > 1) parts.push(make("strong", `${number + 1}. ${record.label}. `));
    parts.push(`${record.proof}; `, record.gpus.length ? `${record.gpu_count} × ${record.gpus.join(", ")}; ` : "",
      Object.entries(record.versions).map(([name, version]) => `${name} ${version}`).join(", "),
      record.started ? `; ${record.started}` : "");
    head.append(make("p", parts, { class: "facts" }));
  }
}

// -- filters ----------------------------------------------------------------------------------------------------------

function drawTools(records) {
  const tools = document.getElementById("tools");
  const search = make("input", null, { type: "search", placeholder: "filter: model, level, failure, KB-…",
    "aria-label": "Show cells that hold these words", oninput: (event) => { state.text = event.target.value; filter(); } });
  tools.append(search);
  for (const [name, count] of counts(records.flatMap((record) => record.cells)))
    tools.append(make("button", [make("span", OUTCOMES[name][0], { class: `tag ${name}`, "aria-hidden": "true" }), ` ${name} ${count}`], {
      type: "button", "aria-pressed": "false", title: OUTCOMES[name][1],
      onclick: (event) => toggle(event.currentTarget, () => state.outcomes.has(name) ? state.outcomes.delete(name) : state.outcomes.add(name)) }));
  if (records.length > 1)
    tools.append(make("button", "only rows that differ", { type: "button", "aria-pressed": "false",
      onclick: (event) => toggle(event.currentTarget, () => { state.differs = !state.differs; }) }));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !document.getElementById("cell").open && event.target !== search) { event.preventDefault(); search.focus(); }
  });
}

function toggle(button, change) {
  change();
  button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") === "true" ? "false" : "true");
  filter();
}

function matches(square, words) {
  return (!state.outcomes.size || state.outcomes.has(square.cell.outcome)) && words.every((word) => square.words.includes(word));
}

function filter() {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const idle = !words.length && !state.outcomes.size;
  let shown = 0;
  for (const row of state.rows) {
    let any = false;
    for (const square of row.squares) {
      const on = idle || matches(square, words);
      square.button.classList.toggle("off", !on);
      any = any || on;
      shown += on ? 1 : 0;
    }
    row.element.hidden = !any || (state.differs && !row.differs);
  }
  for (const axis of state.axes) axis.element.hidden = axis.rows.every((row) => row.element.hidden);
  document.getElementById("shown").textContent = idle && !state.differs
    ? `${plural(state.squares.length, "cell")}. Open one with a click or Enter; arrow keys move; / filters.`
    : `${shown} of ${plural(state.squares.length, "cell")} match.`;
}

// -- the map ----------------------------------------------------------------------------------------------------------

function lanes(records) {
  const models = [...new Set(records.flatMap((record) => record.cells.map((cell) => cell.model)))];
  const found = [];
  for (const model of models)
    for (const [number, record] of records.entries())
      for (const arch of record.archs)
        if (record.cells.some((cell) => cell.model === model && cell.arch === arch)) found.push({ model, number, arch, record });
  return found;
}

function rowsOf(records) {
  const rows = new Map([["", { delta: [], cells: new Map() }]]);
  for (const [number, record] of records.entries())
    for (const cell of record.cells) {
      const key = cell.delta.join("+");
      if (!rows.has(key)) rows.set(key, { delta: cell.delta, cells: new Map() });
      rows.get(key).cells.set(`${number} ${cell.arch} ${cell.model}`, cell);
    }
  return rows;
}

function groupsOf(rows) {
  const groups = new Map([["baseline", []]]);
  const several = [];
  for (const row of rows.values()) {
    if (row.delta.length > 1) { several.push(row); continue; }
    const axis = row.delta.length ? row.delta[0].split(".")[0] : "baseline";
    if (!groups.has(axis)) groups.set(axis, []);
    groups.get(axis).push(row);
  }
  if (several.length) groups.set("several axes", several);
  return groups;
}

function drawMap(records) {
  const columns = lanes(records);
  const table = make("table", null, { class: "map" });
  const caption = make("caption", "Cells by what differs from the baseline (rows) and model (columns)");
  caption.style.cssText = "position:absolute;left:-9999px";
  table.append(caption, headOf(columns, records.length > 1));
  state.rows = []; state.axes = [];
  const body = make("tbody");
  for (const [axis, rows] of groupsOf(rowsOf(records))) {
    const title = make("tr", make("th", axis, { class: "axis", scope: "colgroup", colspan: String(columns.length + 1) }));
    const group = { element: title, rows: [] };
    if (axis !== "baseline") { body.append(title); state.axes.push(group); }
    for (const row of rows) {
      const drawn = drawRow(row, columns);
      if (!drawn.squares.length) continue;
      body.append(drawn.element); state.rows.push(drawn); group.rows.push(drawn);
    }
  }
  table.append(body);
  const map = document.getElementById("map");
  map.append(table, legend(records));
  table.addEventListener("keydown", move);
  if (state.squares.length) state.squares[0].button.tabIndex = 0;
}

function headOf(columns, several) {
  const models = make("tr", make("th", "differs from the baseline", { scope: "col", rowspan: several ? "2" : null }));
  const sides = make("tr");
  for (const model of new Set(columns.map((lane) => lane.model))) {
    const own = columns.filter((lane) => lane.model === model);
    models.append(make("th", several ? model : [model, make("small", own[0].arch)],
      { scope: several ? "colgroup" : "col", colspan: several ? String(own.length) : null }));
    for (const lane of own) sides.append(make("th", `${lane.number + 1}. ${lane.arch}`, { scope: "col", class: "side", title: `${lane.record.label}: ${lane.record.proof}` }));
  }
  return make("thead", several ? [models, sides] : [models]);
}

function drawRow(row, columns) {
  const name = row.delta.join(" + ") || "baseline";
  const element = make("tr", make("th", name, { scope: "row", class: "level" }));
  const squares = [];
  for (const lane of columns) {
    const cell = row.cells.get(`${lane.number} ${lane.arch} ${lane.model}`);
    const field = make("td");
    if (cell) { const square = drawSquare(cell, lane); squares.push(square); state.squares.push(square); field.append(square.button); }
    element.append(field);
  }
  const byLane = new Map();
  for (const square of squares) byLane.set(square.cell.model, [...(byLane.get(square.cell.model) || []), square.cell]);
  const differs = [...byLane.values()].some((cells) => new Set(cells.map((cell) => cell.outcome + kind(cell))).size > 1);
  return { element, squares, differs };
}

function drawSquare(cell, lane) {
  const [symbol, meaning] = OUTCOMES[cell.outcome] || ["?", cell.outcome];
  const words = [cell.id, cell.outcome, kind(cell), cell.known_bad?.id, sentence(cell), cell.failure?.signature].join(" ").toLowerCase();
  const button = make("button", symbol, { type: "button", tabindex: "-1",
    class: `square ${cell.outcome}${lane.record.preflight ? " guess" : ""}`,
    title: clean([cell.id, `${cell.outcome}: ${kind(cell) || meaning}`, sentence(cell).split("\n")[0].slice(0, 200)].filter(Boolean).join("\n")),
    "aria-label": clean(`${cell.id}: ${cell.outcome}${kind(cell) ? `, ${kind(cell)}` : ""}; ${lane.record.proof}`),
    onclick: () => openCell(lane.number, cell, button) });
  return { cell, button, words, lane };
}

function move(event) {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const field = event.target.closest && event.target.closest("td");
  if (!step || !field) return;
  event.preventDefault();
  let row = field.parentElement, column = field.cellIndex;
  for (let tries = 0; tries < 5000; tries += 1) {
    if (step[0]) { row = step[0] > 0 ? row.nextElementSibling : row.previousElementSibling; if (!row) return; if (row.hidden) continue; }
    else { column += step[1]; if (column < 1 || column >= row.cells.length) return; }
    const next = row.cells[column] && row.cells[column].querySelector("button");
    if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); return; }
  }
}

function legend(records) {
  const used = counts(records.flatMap((record) => record.cells));
  const parts = used.map(([name]) => make("span", [make("b", OUTCOMES[name][0]), ` ${OUTCOMES[name][1]}`]));
  if (records.some((record) => record.preflight)) parts.push(make("span", "dashed border: foretold by a preflight, not launched"));
  return make("p", parts, { class: "legend" });
}

// -- one cell ---------------------------------------------------------------------------------------------------------

function openCell(number, cell, button) {
  const record = state.data.records[number];
  const dialog = document.getElementById("cell");
  dialog.replaceChildren(make("div", [
    make("h2", cell.id, { id: "cell-title" }),
    make("span", `${(OUTCOMES[cell.outcome] || ["?"])[0]} ${cell.outcome}`, { class: `tag ${cell.outcome}` }),
    make("button", "Close (Esc)", { type: "button", onclick: () => dialog.close() }),
  ], { class: "bar" }), ...cellParts(record, cell));
  state.opener = button;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#${number}/${encodeURIComponent(cell.id)}`);
}

function cellParts(record, cell) {
  return [
    make("p", `${record.label}; ${record.proof}${cell.gpus?.length ? `; on ${cell.gpus.join(", ")}` : ""}`, { class: "facts" }),
    sentence(cell) ? make("p", sentence(cell), { class: "sentence" }) : null,
    knownBad(cell), control(cell), timeline(cell), checks(cell), measured(cell), output(cell), foretold(cell), past(cell),
    launch(cell), resolved(cell),
    cell.failure?.evidence?.length ? [make("h2", "Evidence"), make("p", `${cell.failure.evidence.join(", ")} in the cell's folder`)] : null,
    cell.log_end ? [make("h2", "End of the server's log"), make("pre", cell.log_end, { tabindex: "0", "aria-label": "end of the server's log" })] : null,
    cell.notes?.length ? [make("h2", "Notes"), make("ul", cell.notes.map((note) => make("li", note)))] : null,
  ].flat(Infinity).filter(Boolean);
}

function link(address) {
  return /^https:\/\/[^\s"'<>]+$/.test(address) ? make("a", address, { href: address, rel: "noreferrer noopener", target: "_blank" }) : address;
}

function knownBad(cell) {
  const entry = cell.known_bad;
  if (!entry) return null;
  return [make("h2", `Known-bad entry ${entry.id}`), make("p", [entry.reason, " ", link(entry.issue || ""), entry.file ? ` (${entry.file}:${entry.line})` : ""])];
}

function control(cell) {
  if (!cell.control) return null;
  return [make("h2", "Control run"), make("p", `${cell.control.cell || "the baseline"}: ${cell.control.outcome || "no outcome"}`)];
}

const seconds = (value) => value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(value < 10 ? 2 : 1)} s`;

function timeline(cell) {
  const phases = Object.entries(cell.timings?.phases || {});
  if (!phases.length) return null;
  const total = phases.reduce((sum, [, time]) => sum + time, 0) || 1;
  const bar = make("div", phases.map(([name, time]) => {
    const part = make("span", name, { title: `${name}: ${seconds(time)}` });
    part.style.flex = `${Math.max(time / total, 0.002)} 1 0`;
    return part;
  }), { class: "time", "aria-hidden": "true" });
  const other = ["lease_wait", "teardown", "memory_release", "total"].filter((name) => cell.timings[name] !== undefined)
    .map((name) => `${name.replace("_", " ")} ${seconds(cell.timings[name])}`);
  return [make("h2", "Phases"), bar, make("p", [...phases.map(([name, time]) => `${name} ${seconds(time)}`), ...other].join(", "), { class: "facts" })];
}

function table(titles, rows) {
  return make("table", [make("thead", make("tr", titles.map((title) => make("th", title, { scope: "col" })))),
    make("tbody", rows.map((row) => row instanceof Node ? row : make("tr", row.map((value) => make("td", value)))))], { class: "rows" });
}

function checks(cell) {
  if (!cell.checks?.length) return null;
  return [make("h2", "Checks"), table(["check", "outcome", "why"],
    cell.checks.map(([name, outcome, reason]) => [name, make("span", `${(OUTCOMES[outcome] || ["?"])[0]} ${outcome}`, { class: `tag ${outcome}` }), reason]))];
}

function range(item) {
  const values = [...(item.samples || []), item.median, item.floor?.bound].filter((value) => typeof value === "number");
  if (values.length < 2) return "";
  const low = Math.min(...values, 0), high = Math.max(...values) * 1.05 || 1;
  const place = (value) => `${(100 * (value - low)) / (high - low)}%`;
  const drawing = make("span", null, { class: "range", role: "img", "aria-label": `samples ${(item.samples || []).join(", ")}` });
  const samples = item.samples || [];
  if (samples.length) { const box = make("u"); box.style.left = place(Math.min(...samples)); box.style.right = `calc(100% - ${place(Math.max(...samples))})`; drawing.append(box); }
  const median = make("i"); median.style.left = place(item.median); drawing.append(median);
  if (typeof item.floor?.bound === "number") { const floor = make("b"); floor.style.left = place(item.floor.bound); drawing.append(floor); }
  return drawing;
}

function measured(cell) {
  if (!cell.measurements?.length) return null;
  const floors = (floor) => !floor ? "" : typeof floor === "string" ? floor : floor.text || JSON.stringify(floor);
  return [make("h2", "Measurements"), table(["load", "metric", "median", "spread", "floor", "verdict", "samples (red: floor)"],
    cell.measurements.map((item) => [item.load, item.metric, typeof item.median === "number" ? `${item.median.toFixed(1)} ${item.unit}` : "",
      typeof item.spread === "number" ? item.spread.toFixed(2) : "", floors(item.floor), [item.verdict, item.note].filter(Boolean).join(": "), range(item)]))];
}

function output(cell) {
  const parts = Object.entries(cell.output?.parts || {});
  if (!parts.length) return null;
  const number = (value) => typeof value === "number" ? value.toFixed(3) : "";
  return [make("h2", `Output against ${cell.output.compared_with} (limits: ${cell.output.tolerance})`),
    table(["part", "mean (nats)", "limit", "p99", "limit", "tokens"], parts.map(([name, part]) =>
      [name, number(part.mean), number(part.mean_limit), number(part.p99), number(part.p99_limit), String(part.tokens ?? "")]))];
}

function foretold(cell) {
  const parts = [];
  if (cell.depth) parts.push(make("h2", `Preflight, depth ${cell.depth}`));
  if (cell.images?.length) parts.push(table(["library", "file", "image", "verdict"],
    cell.images.map((item) => [item.library, item.file, item.image || "none", item.verdict])));
  if (cell.kernels?.length) parts.push(table(["kernel", "module", "tokens", "bytes", "limit", "verdict"],
    cell.kernels.map((item) => [item.name, item.module, String(item.tokens ?? ""), String(item.bytes ?? ""), String(item.limit ?? ""),
      [item.verdict, item.reason].filter(Boolean).join(": ")])));
  const gates = Object.entries(cell.gate || {});
  if (gates.length) parts.push(make("h2", "SGLang's attention registry"), table(["backend", "answer"], gates));
  return parts.length ? parts : null;
}

function past(cell) {
  if (!cell.history?.length) return null;
  let before = {};
  const rows = cell.history.map((entry) => {
    const moved = Object.entries(entry.versions || {}).filter(([name, version]) => before[name] !== undefined && before[name] !== version)
      .map(([name, version]) => `${name} ${before[name]} → ${version}`).join(", ");
    before = { ...before, ...entry.versions };
    return [entry.started || "", make("span", `${(OUTCOMES[entry.outcome] || ["?"])[0]} ${entry.outcome}`, { class: `tag ${entry.outcome}` }),
      entry.failure, typeof entry.speed === "number" ? `${entry.speed.toFixed(1)} tok/s` : "", moved];
  });
  return [make("h2", "Earlier runs"), table(["started", "outcome", "failure", "single stream", "what moved"], rows)];
}

const quoted = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`;

function launch(cell) {
  if (!cell.argv?.length) return null;
  const text = clean([...Object.entries(cell.env || {}).map(([name, value]) => `${name}=${quoted(value)}`), ...cell.argv.map(quoted)].join(" "));
  const copied = make("span", "", { role: "status" });
  const button = make("button", "Copy", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); copied.textContent = " copied"; }
    catch { copied.textContent = " this browser does not let a page copy: select the text"; }
  } });
  return [make("h2", "Launched as"), make("pre", text, { tabindex: "0", "aria-label": "launch command" }), make("p", [button, copied])];
}

function resolved(cell) {
  const found = cell.resolved || {};
  const asked = Object.entries(cell.flags || {});
  if (!asked.length && !Object.keys(found).length) return null;
  const rows = asked.map(([flag, value]) => {
    const name = flag.replaceAll("-", "_");
    const used = found[name];
    const differs = used !== undefined && used !== null && typeof value !== "boolean" && String(used) !== String(value);
    return make("tr", [make("td", `--${flag}`, { class: "mono" }), make("td", String(value)), make("td", used === undefined ? "not reported" : String(used))],
      { class: differs ? "differs" : null });
  });
  const rest = Object.entries(found).filter(([name]) => !asked.some(([flag]) => flag.replaceAll("-", "_") === name) && found[name] !== null)
    .map(([name, value]) => `${name}=${value}`).join(", ");
  return [make("h2", "Asked, and what the server says it uses"), asked.length ? table(["flag", "asked", "used"], rows) : null, rest ? make("p", rest, { class: "facts mono" }) : null];
}

// -- start ------------------------------------------------------------------------------------------------------------

function openLinked() {
  const match = /^#(\d+)\/(.+)$/.exec(location.hash);
  if (!match) return;
  const id = decodeURIComponent(match[2]);
  const square = state.squares.find((one) => one.lane.number === Number(match[1]) && one.cell.id === id);
  if (square) openCell(square.lane.number, square.cell, square.button);
}

async function start() {
  state.data = await unpack(document.getElementById("data").textContent);
  const records = state.data.records;
  drawHead(records); drawTools(records); drawMap(records); filter();
  if (state.data.logs_left_out)
    document.getElementById("map").append(make("p", `The log ends of ${plural(state.data.logs_left_out, "cell")} are left out here, to keep this file small: they lie in the cells' folders.`, { class: "legend" }));
  const dialog = document.getElementById("cell");
  dialog.addEventListener("close", () => { history.replaceState(null, "", location.pathname + location.search); if (state.opener) state.opener.focus(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  window.addEventListener("hashchange", openLinked);
  openLinked();
  document.body.getBoundingClientRect();
  performance.mark("drawn");
  document.documentElement.dataset.ready = "yes";
}
start().catch((error) => {
  document.getElementById("head").append(make("p", `This report could not be drawn: ${error}. summary.md beside it says the same in plain text.`, { class: "banner" }));
});
