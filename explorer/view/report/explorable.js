"use strict";
// A reader's policy on a recorded step: blocks, presets and a budget in, figures, timeline and graph out, at each click.
//
// replay.js forecasts; blockGraph is explorer/view/graph/graph.js, the drawing of the app, whose server is this script.
// Plotly draws the timeline once. The line of the policy is a path of this script over it: Plotly takes 90 to 250 ms to
// move a line (two CPU cores), a path takes 2. Text reaches the page through textContent alone.
const explorable = document.querySelector("section.explorable");
const facts = JSON.parse(explorable.querySelector(".explorable-data").textContent);
const recorded = openStep(facts.tables);
const [pick, all] = [(selector) => explorable.querySelector(selector), (selector) => [...explorable.querySelectorAll(selector)]];
// A block may have any name, `constructor` and `__proto__` too: what is found by a name is a Map.
const mapOf = (named) => new Map(Object.entries(named));
const [labels, members, saved, presets] = [facts.graph.labels, facts.graph.members, facts.graph.saved, facts.presets].map(mapOf);
const page = { policy: [], undo: [], last: "", level: 0, answer: null, taken: 0, selected: "" };
const place = new Map(facts.order.map((fqn, i) => [fqn, i]));
const MINUS = "\u2212", NO_FIGURE = "not predicted", POINTS = 1000;

// ---- numbers, as explorer/view/drawing/units.py writes them

// A tie goes to the even digit, as in Python; every tie of up to two digits is a multiple of 1/8.
function fixed(value, digits) {
  const even = Number.isInteger(value * 8) ? roundHalfEven(value * 10 ** digits) / 10 ** digits : value;
  return even.toFixed(digits).replace(/\B(?<!\.\d*)(?=(\d{3})+(?!\d))/g, ",");
}

const SCALES = [[2 ** 40, "TiB", 2], [2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1], [1, "B", 0]];
const scaleOf = (bytes) => SCALES.find(([unit]) => bytes >= unit) ?? SCALES[4];

function number(value, digits) {
  if (!(value > 0 && value < 1)) return value ? fixed(value, digits) : "0";
  return fixed(value, Math.max(digits, 1 - Math.floor(Math.log10(value)))).replace(/0$/, "");
}

function mib(bytes) {
  const size = Math.abs(bytes), [unit, name, digits] = scaleOf(size);
  return size ? `${bytes < 0 ? MINUS : ""}${fixed(size / unit, digits)} ${name}` : "0 MiB";
}

// `15.0 → 0.5 MiB`: one unit, and digits that tell different sizes apart.
function fromTo(old, now, between = " → ") {
  let [unit, name, digits] = scaleOf(Math.max(old, now) || 2 ** 20);
  const least = Math.min(old, now), both = (text) => [text(old), text(now)], read = (text) => Number(text.replace(/,/g, ""));
  if (least > 0 && least < unit / 1000) return both(mib).join(between);
  let texts = both((size) => number(size / unit, digits));
  while (old !== now && read(texts[0]) === read(texts[1])) {
    if (++digits > 4) return `${both((size) => fixed(size, 0)).join(between)} B`;
    texts = both((size) => fixed(size / unit, digits));
  }
  return `${texts.join(between)} ${name}`;
}

function percent(share) {
  const value = 100 * share, sign = value < 0 ? MINUS : value > 0 ? "+" : "";
  if (value && Math.abs(value) < 0.05) return `${sign}<0.1 %`;
  return `${sign}${fixed(Math.abs(value), Math.abs(value) >= 10 ? 0 : 1)} %`;
}

// ---- policies: units { blocks, save_ops }

const on = (policy) => new Set(policy.flatMap((unit) => unit.blocks));
const sorted = (policy) => [...policy].sort((a, b) => place.get(a.blocks[0]) - place.get(b.blocks[0]));

// `policy` with exactly the blocks in `marked`: a segment that lost a block splits, a new block is a unit of its own.
function policyAfter(policy, marked) {
  const units = [];
  for (const unit of policy) {
    let run = [];
    for (const fqn of [...unit.blocks, null]) {
      if (marked.has(fqn)) run.push(fqn);
      else if (run.length) { units.push({ ...unit, blocks: run }); run = []; }
    }
  }
  const named = on(units);
  for (const fqn of marked) if (!named.has(fqn)) units.push({ blocks: [fqn], save_ops: [] });
  return sorted(units.map((unit) => (recorded.table.has(keyOf(unit)) ? unit : { ...unit, save_ops: [] })));
}

// The unit that joins the units of the last clicked block and of a neighbour; undefined where none can.
function joinable(policy) {
  const unitOf = (fqn) => policy.find((unit) => unit.blocks.includes(fqn));
  const ends = Object.entries(facts.following).filter((pair) => pair.includes(page.last));
  for (const [first, second] of ends) {
    const [a, b] = [unitOf(first), unitOf(second)];
    const unit = a && b && a !== b && { blocks: [...a.blocks, ...b.blocks], save_ops: [] };
    if (unit && recorded.table.has(keyOf(unit))) return { unit, parts: [a, b] };
  }
}

const quote = (name) => encodeURIComponent(name).replace(/[!'()*]/g, (sign) => `%${sign.charCodeAt(0).toString(16)}`);

// `blocks.0;blocks.1+blocks.2;head:aten.mm.default`: units, blocks of a segment, operators whose results are kept.
const written = (policy) => policy.map(({ blocks, save_ops }) =>
  blocks.map(quote).join("+") + (save_ops.length ? `:${save_ops.map(quote).join(",")}` : "")).join(";");

function read(text) {
  const names = (part, sign) => (part ? part.split(sign).map(decodeURIComponent) : []);
  return text.split(";").filter(Boolean).map((unit) => {
    const [blocks, ops] = unit.split(":");
    return { blocks: names(blocks, "+"), save_ops: names(ops, ",") };
  });
}

// The text of a policy file: YAML, which takes JSON for a value.
function fileText() {
  const short = ({ blocks, save_ops }) => (save_ops.length ? { blocks, action: "save_ops", save_ops } : blocks.length > 1 ? blocks : blocks[0]);
  const units = page.policy.map((unit) => `\n  - ${JSON.stringify(short(unit))}`).join("");
  return facts.file.replace(/^  units: \[\]$/m, () => `  units:${units || " []"}`);
}

// The address that opens the app with the policy: `run` is packed as explorer/ui/session/address.py reads it.
async function appAddress() {
  const units = page.policy.map(({ blocks, save_ops }) => ({ blocks, save_ops, action: save_ops.length ? "save_ops" : "recompute" }));
  const text = JSON.stringify({ ...facts.address.spec, policy: { units } });
  const packed = await new Response(new Blob([text]).stream().pipeThrough(new CompressionStream("deflate"))).arrayBuffer();
  const run = btoa(String.fromCharCode(...new Uint8Array(packed))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  return `${facts.address.app}?${new URLSearchParams({ ...facts.address.query, run })}`;
}

// ---- the answer

// As share_of_blocks of explorer/plan/names.py: recomputed blocks of those that presets count, and what is beside.
function shareOfBlocks(named) {
  const lies = (fqn, block) => !block || fqn === block || fqn.startsWith(`${block}.`);
  const chosen = named.filter((fqn) => !named.some((other) => other !== fqn && lies(fqn, other)));
  const whole = facts.counted.filter((fqn) => chosen.some((block) => lies(fqn, block)));
  const part = facts.counted.filter((fqn) => !whole.includes(fqn) && chosen.some((block) => lies(block, fqn)));
  const more = chosen.filter((block) => !facts.counted.some((fqn) => lies(fqn, block) || lies(block, fqn)));
  const total = facts.counted.length, n = total ? whole.length + part.length : chosen.length;
  const word = (total || n) === 1 ? "block" : "blocks";
  return [total ? `${n} of ${total}` : `${n}`,
    `${word}${total && part.length ? `, ${part.length} in part` : ""}${total && more.length ? ` and ${more.length} more` : ""}`];
}

function show(policy, { remember = true } = {}) {
  if (remember) page.undo.push(page.policy);
  page.policy = sorted(policy);
  const before = page.baseline, now = (page.answer = forecast(recorded, page.policy));
  const ratio = (value) => (value === null ? NO_FIGURE : `×${fixed(value, 2)}`);
  const size = (was, is) => (is === null ? [NO_FIGURE, ""] : !page.policy.length ? [mib(is), ""] : [fromTo(was, is), percent(is / was - 1)]);
  const hazards = hazardsOf(page.policy), gravest = hazards.find(([, kind]) => kind === "error") ?? hazards[0];
  const share = shareOfBlocks([...on(page.policy)]);
  figures([
    size(before.peak, now.peak), size(before.saved, now.saved),
    [ratio(now.flopRatio), now.flopRatio === null ? "" : `${percent(now.flopRatio - 1)}, counted`],
    [now.timeRatio === null ? NO_FIGURE : `≈ ${ratio(now.timeRatio)}`, "predicted"],
    share,
    gravest ? [gravest[1] === "error" ? "unsafe" : "look", gravest[2]] : ["none known", "of single blocks"],
  ], gravest?.[1]);
  pick(".answer").textContent = now.refusal || sentence(before, now);
  drawGraph();
  drawLine();
  tools();
  showHash();
}

function figures(pairs, hazard) {
  all(".live .card").forEach((card, i) => {
    card.querySelector("b").textContent = pairs[i][0];
    card.querySelector("b + span")?.remove();
    const note = card.appendChild(document.createElement("span"));
    note.textContent = pairs[i][1];
    note.className = i === 5 && hazard ? (hazard === "error" ? "bad" : "warn") : "quiet";
  });
}

function sentence(before, now) {
  if (!page.policy.length) return "Everything is kept. Click a block: it forgets what it computed, and runs again in backward.";
  const cost = [now.flopRatio === null ? "" : `${percent(now.flopRatio - 1)} FLOPs`, now.timeRatio === null ? "" : `≈ ×${fixed(now.timeRatio, 2)} time`];
  return `${fromTo(before.peak, now.peak)} (${percent(now.peak / before.peak - 1)}) for ${cost.filter(Boolean).join(", ")}. Predicted from the recorded step; nothing ran.`;
}

const hazardsOf = (policy) => policy.flatMap((unit) => facts.hazards[placeOf.get(keyOf(unit))] ?? []);
const placeOf = new Map(facts.tables.units.map((unit, i) => [keyOf(unit), i]));

// ---- the block graph

const host = pick(".blocks").attachShadow({ mode: "open" });
host.innerHTML = '<style></style><div class="graph" role="tree" aria-label="Block graph" aria-multiselectable="true"></div>';
host.querySelector("style").textContent = blockGraphStyle;

function drawGraph() {
  const level = facts.graph.levels[page.level];
  const data = { ...facts.graph, ...level, labels: labelsOf(page.policy), on: [...on(page.policy)], cuts: [], taken: page.taken,
    selected: page.selected, segments: page.policy.filter((unit) => unit.blocks.length > 1).map((unit) => unit.blocks),
    actions: Object.fromEntries(page.policy.filter((unit) => unit.save_ops.length).flatMap((unit) => unit.blocks.map((fqn) => [fqn, "save ops"]))),
    jump: null, height: 560, window: null };
  blockGraph({ data: [data], parentElement: host, setStateValue: onSteps });
}

function onSteps(name, steps) {
  if (name !== "steps") return;
  const { n, kind, ids } = steps.list.at(-1);
  page.taken = n;
  if (kind === "select") page.selected = ids.join("");
  if (kind === "open") {
    const levels = facts.graph.levels, opens = !levels[page.level].open.includes(ids[0]);
    const fits = levels.map((level) => level.open.includes(ids[0]) === opens);
    page.level = opens ? fits.indexOf(true) : fits.lastIndexOf(true);
  }
  if (kind !== "on") return drawGraph();
  const after = on(page.policy);
  for (const fqn of ids) after.delete(fqn) || after.add(fqn);
  page.last = ids.at(-1);
  show(policyAfter(page.policy, after));
}

// Texts on the blocks, as explorer/view/graph/labels.py writes them for a forecast.
function labelsOf(policy) {
  if (!policy.length) return facts.graph.labels;
  const marked = on(policy), freed = page.answer.freed;
  const holders = (fqn) => fqn.split(".").slice(0, -1).map((_, i, parts) => fqn.split(".").slice(0, parts.length - i).join("."));
  const outer = (fqn) => holders(fqn).find((holder) => marked.has(holder));
  const inside = new Map();
  for (const fqn of marked) {
    if (!outer(fqn)) for (const holder of holders(fqn)) inside.set(holder, [...(inside.get(holder) ?? []), fqn]);
  }
  const held = (fqn) => {
    const sizes = (inside.get(fqn) ?? [fqn]).map((block) => freed.get(block));
    return sizes.includes(undefined) ? null : Math.max(saved.get(fqn) - sum(sizes), 0);
  };
  const arrow = (before, now) => (now === null ? `${mib(before)} → ?` : fromTo(before, now, " → ≈ "));
  const change = (fqn) => {
    if (!marked.has(fqn) && !inside.has(fqn)) return outer(fqn) ? `${mib(saved.get(fqn))} with ${outer(fqn)}` : mib(saved.get(fqn));
    return !marked.has(fqn) && outer(fqn) ? `${mib(saved.get(fqn))} with ${outer(fqn)}` : arrow(saved.get(fqn), held(fqn));
  };
  const ofRun = (fqns) => {
    const each = new Set(fqns.map(change));
    if (each.size === 1) return `${[...each][0]} each`;
    const sizes = fqns.map((fqn) => (marked.has(fqn) || inside.has(fqn) || outer(fqn) ? held(fqn) : saved.get(fqn)));
    const before = sum(fqns.map((fqn) => saved.get(fqn))), now = sizes.includes(null) ? null : sum(sizes);
    return now === before ? `${mib(before)} in all` : `${arrow(before, now)} in all`;
  };
  const segments = new Map(policy.filter((unit) => unit.blocks.length > 1).flatMap(({ blocks }) =>
    blocks.map((fqn, i) => [fqn, `${i + 1} of ${blocks.length} together`])));
  const badges = new Map(policy.flatMap((unit) => unit.blocks.map((fqn) => [fqn, hazardsOf([unit])])));
  return Object.fromEntries([...labels].map(([id, [bytes, note, signs, ...rest]]) => {
    const text = members.has(id) ? ofRun(members.get(id)) : saved.has(id) && bytes !== "never called" ? change(id) : bytes;
    return [id, [text, segments.get(id) ?? note, [...(badges.get(id) ?? []), ...signs], ...rest]];
  }));
}

// ---- the line over the timeline

const SVG = "http://www.w3.org/2000/svg", figure = pick("figure.chart");

function thinned(line) {
  const width = Math.max(line.length / POINTS, 1), ticks = [];
  for (let start = 0; start < line.length; start += width) {
    const end = Math.min(Math.floor(start + width), line.length);
    let low = Math.floor(start), high = low;
    for (let tick = low; tick < end; tick++) {
      if (line[tick] < line[low]) low = tick;
      if (line[tick] > line[high]) high = tick;
    }
    ticks.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return ticks;
}

function drawLine() {
  const plot = figure.querySelector(".js-plotly-plot"), plane = plot?._fullLayout?._plots.xy?.plot.node(), { line, peak } = page.answer;
  if (!plane) return;
  let layer = plane.querySelector(".policy");
  if (!layer) {
    layer = plane.appendChild(document.createElementNS(SVG, "g"));
    layer.setAttribute("class", "policy");
    for (const name of ["path", "path", "circle"]) layer.appendChild(document.createElementNS(SVG, name));
    const label = plot.querySelector(".infolayer").appendChild(document.createElementNS(SVG, "text"));
    label.setAttribute("class", "policy-peak");
  }
  const label = plot.querySelector(".policy-peak"), hidden = !line || !page.policy.length;
  layer.style.display = label.style.display = hidden ? "none" : "";
  if (hidden) return;
  const { xaxis, yaxis } = plot._fullLayout, [border, factor, unit] = facts.axis;
  const x = (tick) => xaxis.d2p(tick <= border ? tick : border + (tick - border) * factor), y = (tick) => yaxis.d2p(line[tick] / unit);
  const ticks = thinned(line), way = ticks.map((tick, i) => (i ? `H${x(tick).toFixed(1)}V` : `M${x(tick).toFixed(1)},`) + y(tick).toFixed(1)).join("");
  const [ground, pen, dot] = layer.children, top = line.indexOf(peak);
  ground.setAttribute("d", way);
  pen.setAttribute("d", way);
  dot.setAttribute("cx", x(top));
  dot.setAttribute("cy", y(top));
  dot.setAttribute("r", 4);
  label.textContent = `≈ ${mib(peak)}`;
  label.setAttribute("x", xaxis._offset + Math.min(Math.max(x(top), 40), xaxis._length - 40));
  label.setAttribute("y", yaxis._offset + y(top) - 10);
  if (peak / unit > yaxis.range[1]) Plotly.relayout(plot, { "yaxis.range": [0, (1.15 * peak) / unit] });
}

figure.addEventListener("drawn", () => {
  drawLine();
  figure.querySelector(".js-plotly-plot").on("plotly_afterplot", drawLine);
});

// ---- presets, budget, undo, links

function tools() {
  const now = written(page.policy), join = joinable(page.policy), undo = pick('[data-act="undo"]'), button = pick('[data-act="join"]');
  all("[data-preset]").forEach((one) => one.setAttribute("aria-pressed", written(sorted(presets.get(one.dataset.preset))) === now));
  undo.disabled = !page.undo.length;
  button.hidden = !join;
  if (join) button.textContent = `Recompute ${join.unit.blocks.join(" and ")} as one segment`;
  const slider = pick(".budget input");
  if (!slider) return;
  const plan = page.plan && written(sorted(page.plan.units)) === now ? page.plan : null;
  pick(".budget output").textContent = plan ? `${mib(page.budget)}: ${plan.words}` : "drag: the graph follows with the cheapest policy";
  pick(".proof").textContent = plan ? `The plan of this budget. ${plan.proof}` : "";
}

// The budgets of the slider: from the least peak of a plan up to the peak of everything kept.
function budgetAt(share) {
  const least = Math.min(...facts.plans.map((plan) => plan.peak));
  return Math.ceil(least + share * (Math.max(page.baseline.peak, least) - least));
}

function takeBudget(share) {
  page.budget = budgetAt(share);
  const within = facts.plans.filter((plan) => plan.peak <= page.budget);
  page.plan = within.reduce((best, plan) => (plan.cost < best.cost ? plan : best));
  if (written(sorted(page.plan.units)) === written(page.policy)) tools();
  else show(page.plan.units);
}

const hash = () => `#policy=${written(page.policy)}`;
// A browser refuses more than a few changes of the address a second: it changes when a reader pauses.
function showHash() {
  clearTimeout(page.timer);
  page.timer = setTimeout(() => history.replaceState(null, "", hash()), 200);
}

function fromHash() {
  const text = location.hash.match(/^#policy=(.*)$/)?.[1], name = location.hash.match(/^#preset=(.*)$/)?.[1];
  if (presets.has(name)) return presets.get(name);
  if (text === undefined) return null;
  try {
    const policy = read(text), strange = policy.find((unit) => !recorded.table.has(keyOf(unit)));
    if (!strange) return policy;
    page.complaint = `The link names ${strange.blocks.join(" and ")}, which this page cannot recompute: was it made for another model?`;
  } catch { page.complaint = "The link cannot be read: copy the whole address again, to its end."; }
  return null;
}

function complain() {
  if (page.complaint) pick(".answer").textContent = page.complaint;
  page.complaint = "";
}

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/yaml" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

explorable.addEventListener("click", async ({ target }) => {
  const { preset, act, go } = target.closest("button, a")?.dataset ?? {};
  if (preset) show(presets.get(preset));
  if (act === "undo") show(page.undo.pop(), { remember: false });
  if (act === "join") { const { unit, parts } = joinable(page.policy); show([...page.policy.filter((one) => !parts.includes(one)), unit]); }
  if (act === "file") save(`${facts.name}-policy.yaml`, fileText());
  if (act === "link") { await navigator.clipboard?.writeText(location.href.split("#")[0] + hash()); target.textContent = "Copied"; }
  if (act === "app") window.open(await appAddress(), "_blank");
  if (go !== undefined) move(Number(go));
});
pick(".budget input")?.addEventListener("input", ({ target }) => takeBudget(target.value / target.max));
window.addEventListener("hashchange", () => {
  const policy = fromHash();
  if (policy) show(policy);
  complain();
});

// ---- the guided path, with the question before the answer

const steps = all(".path .step");
function move(by) {
  page.step = by ? Math.min(Math.max((page.step ?? 0) + by, 0), steps.length - 1) : null;
  pick(".path").hidden = page.step === null;
  steps.forEach((one, i) => { one.hidden = i !== page.step; });
  pick('[data-go="-1"]').hidden = !page.step;
  pick('[data-go="1"]').hidden = page.step === steps.length - 1;
  pick(".guesses").hidden = steps[page.step]?.dataset.step !== "guess";
}

function askToGuess() {
  const answer = document.createElement("p");
  const buttons = facts.guesses.map((guess) => {
    const button = document.createElement("button");
    button.textContent = mib(guess.peak_bytes);
    button.addEventListener("click", () => {
      const right = facts.guesses.find((other) => other.right);
      answer.textContent = guess.right ? `Right. ${guess.because} Take Recompute all, and see.`
        : `Not ${mib(guess.peak_bytes)}. ${guess.because} The forecast is ${mib(right.peak_bytes)}. Take Recompute all, and see.`;
      answer.className = guess.right ? "good" : "";
    });
    return button;
  });
  pick(".guesses").append(...buttons, answer);
}

page.baseline = forecast(recorded, []);
page.level = Math.min(1, facts.graph.levels.length - 1);
askToGuess();
page.step = 0;
move(-1);
page.policy = fromHash() ?? facts.policy;
show(page.policy, { remember: false });
complain();
