"use strict";
// The forecast of a policy in a browser: explorer/plan/predict/changes.py once more, to the byte.
//
// explorer/plan/predict/tables.py made the tables: the recorded step, and for each unit the changes by its calls alone.
// This file combines calls by the numbered rules of explorer/plan/predict/__init__.py, and the code cites them. Names
// are those of changes.py. A block may have any name, `constructor` too: what is found by a name is a Map. `python -m benchmarks.explorable` compares both on 1,406 random policies.

const isWithin = (fqn, block) => !block || fqn === block || fqn.startsWith(block + ".");
const keyOf = (unit) => JSON.stringify([unit.blocks, unit.save_ops ?? []]);
const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);

// The first place in the ascending `values` whose value is above `value`.
function after(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

function openStep(tables) {
  const { n_bytes: size, born, died, n_ticks } = tables;
  const byBirth = Array.from(size, (_, entry) => entry).sort((a, b) => born[a] - born[b] || a - b);
  const line = lineOf(size.map((bytes, entry) => [born[entry], died[entry], bytes]), n_ticks + 1);
  return { ...tables, forward_end_tick: tables.forward_end_tick ?? -1, size, byBirth, births: byBirth.map((entry) => born[entry]), line,
    windows: new Map(Object.entries(tables.windows)), table: new Map(tables.units.map((unit) => [keyOf(unit), unit])) };
}

// Bytes at each of `length` ticks, of changes [first tick, end tick, bytes].
function lineOf(changes, length, base) {
  const line = new Float64Array(length + 1);
  for (const [first, end, bytes] of changes) {
    if (first >= end || first >= length) continue;
    line[first] += bytes;
    line[Math.min(end, length)] -= bytes;
  }
  for (let tick = 1; tick < length; tick++) line[tick] += line[tick - 1];
  if (base) for (let tick = 0; tick < length; tick++) line[tick] += base[tick];
  return line.subarray(0, length);
}

// Entries born after tick `first` and not after `end`, in order of birth.
const between = (step, first, end) => step.byBirth.slice(after(step.births, first), after(step.births, end));

// Peak bytes of [born, died, bytes] alone, over the ticks at which one of them is born.
function mostAtOnce(lives) {
  const births = [...lives].sort((a, b) => a[0] - b[0]), deaths = [...lives].sort((a, b) => a[1] - b[1]);
  let held = 0, most = births.length ? -Infinity : 0, dead = 0;
  for (let i = 0; i < births.length; i++) {
    held += births[i][2];
    if (i + 1 < births.length && births[i + 1][0] === births[i][0]) continue;
    while (dead < deaths.length && deaths[dead][1] <= births[i][0]) held -= deaths[dead++][2];
    most = Math.max(most, held);
  }
  return most;
}

// The innermost unit around each unit that lies inside others.
function enclosing(units) {
  const named = new Map(units.flatMap((unit) => unit.blocks.map((fqn) => [fqn, unit])));
  const holders = new Map();
  for (const unit of units) {
    const parts = unit.blocks[0].split(".");
    while (parts.pop() !== undefined && parts.length) {
      const holder = named.get(parts.join("."));
      if (holder) { holders.set(unit, holder); break; }
    }
  }
  return holders;
}

function chain(unit, outer) {
  const holders = [];
  while ((unit = outer.get(unit))) holders.push(unit);
  return holders;
}

// True if the last tensor that `unit` saves is saved in its inner unit `child`.
const stopsInside = (unit, child) =>
  unit.last_saved_in !== "" && child.blocks.some((fqn) => isWithin(unit.last_saved_in, fqn));

// The calls of all units, outer calls first. Each knows the call around it (`parent`) and the calls directly inside.
function nestOf(units, outer) {
  const order = [...units].sort((a, b) => chain(a, outer).length - chain(b, outer).length);
  const nest = [], places = new Map();
  for (const unit of order) {
    const holders = chain(unit, outer).flatMap((holder) => places.get(holder));
    const children = units.filter((child) => outer.get(child) === unit);
    const stops = children.some((child) => stopsInside(unit, child));
    const own = unit.calls.map((call) => {
      const parent = holders.find((around) => around.call.first <= call.first && call.end <= around.call.end);
      // Rule 5: the norms of a unit inside are copied by that unit.
      const copies = call.copies.filter(([norm]) => !children.some(({ blocks }) => blocks.some((fqn) => isWithin(norm, fqn))));
      return { call, unit, parent, stops, copies, inside: [] };
    });
    places.set(unit, own);
    nest.push(...own);
  }
  nest.forEach((node, index) => { node.index = index; node.parent?.inside.push(node); });
  return nest;
}

const below = (node) => node.inside.flatMap((inner) => [inner, ...below(inner)]);

// Rule 2: until when tensors stay that calls inside others are given in containers, and those that nothing else saves.
function keptByContainers(step, nest) {
  const until = new Map(), savers = new Map();
  for (const { call, unit, parent } of nest) {
    let outermost = parent;
    while (outermost?.parent) outermost = outermost.parent;
    for (const [entry, blocks] of parent ? call.in_containers : []) {
      if (step.born[entry] <= outermost.call.first || step.born[entry] > outermost.call.end) continue;
      until.set(entry, Math.max(until.get(entry) ?? 0, call.backward_ends));
      const others = savers.get(entry) ?? blocks;
      savers.set(entry, others.filter((fqn) => !unit.blocks.some((block) => isWithin(fqn, block))));
    }
  }
  return { until, never: new Set([...savers.keys()].filter((entry) => !savers.get(entry).length)) };
}

// Rule 1: of several calls that free an entry, the first decides when it leaves, the innermost when it is back.
function absences(step, nest, never) {
  const owner = new Int32Array(step.size.length).fill(-1);
  const leave = new Float64Array(step.size.length).fill(Infinity), back = new Float64Array(step.size.length);
  for (const { call, index } of nest) {
    call.entries.forEach((entry, i) => {
      owner[entry] = index; // inner calls come last
      leave[entry] = Math.min(leave[entry], call.freed_at[i]);
      back[entry] = never.has(entry) ? step.died[entry] : call.backward_begins;
    });
  }
  return { owner, leave, back };
}

// Rules 2 and 6: the stretches [from, to] in which checkpoints keep inputs and results, by entry.
function retained(step, nest, inContainers) {
  const stretches = new Map();
  const keep = (entry, from, to) => {
    if (!stretches.has(entry)) stretches.set(entry, []);
    stretches.get(entry).push([Math.max(from, step.born[entry]), to]);
  };
  for (const { call, parent } of nest) {
    for (const entry of call.inputs) {
      if (!parent || !inContainers.has(entry)) keep(entry, parent ? parent.call.backward_begins : 0, parent ? call.backward_begins : call.backward_ends);
    }
    for (const [entry, from, to] of call.results) keep(entry, from, to);
  }
  return stretches;
}

// Touching and overlapping stretches merged.
function joined(stretches, length) {
  const merged = [];
  for (const [first, end] of stretches.filter(([a, b]) => a < b).sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1), stop = Math.min(end, length - 1);
    if (last && first <= last[1]) last[1] = Math.max(last[1], stop);
    else merged.push([first, stop]);
  }
  return merged;
}

// The changes of the line, the bytes saved at the end of forward, and where each touched entry is.
function simulate(step, nest) {
  const { born, died, size, forward_end_tick: border, restored_until: restored } = step;
  const { until, never } = keptByContainers(step, nest);
  const { owner, leave, back } = absences(step, nest, never), kept = retained(step, nest, until);
  const gone = new Map(), lives = new Map(), changes = [], away = new Uint8Array(size.length);
  let saved = 0;
  for (let entry = 0; entry < size.length; entry++) {
    const isFreed = owner[entry] >= 0, keeps = kept.get(entry);
    if (!isFreed && !keeps) continue;
    const plain = !keeps && born[entry] <= leave[entry] && leave[entry] <= died[entry] && back[entry] <= died[entry]
      && (!isFreed || restored[entry] === died[entry]);
    if (plain && leave[entry] < back[entry]) {
      gone.set(entry, [leave[entry], back[entry]]);
      changes.push([leave[entry], back[entry], -size[entry]]);
    } else if (!plain) {
      const own = isFreed ? [[born[entry], leave[entry]], [back[entry], restored[entry]]] : [[born[entry], died[entry]]];
      const stretches = joined([...own, ...(keeps ?? [])], step.n_ticks + 3);
      if (stretches.length) lives.set(entry, stretches);
      changes.push([born[entry], died[entry], -size[entry]], ...stretches.map(([from, to]) => [from, to, size[entry]]));
    }
    const isKept = keeps?.some(([from, to]) => from <= border && border < to);
    if (isKept && died[entry] <= border) saved += size[entry];
    // An entry freed right after the last event of forward counts as freed at the end of forward.
    if (isFreed && !isKept && leave[entry] <= border + 1 && border < back[entry]) {
      away[entry] = 1;
      saved -= size[entry];
    }
  }
  for (const { call, copies } of nest) {
    changes.push([call.first, call.backward_ends, step.stash_bytes], ...copies.map(([, from, to, bytes]) => [from, to, bytes])); // rules 3, 5
    if (call.first <= border && border < call.backward_ends) saved += step.stash_bytes;
  }
  for (const [entry, end] of until) {
    const first = Math.min(leave[entry], died[entry]);
    changes.push([first, end, size[entry]]);
    if (first <= border && border < end) saved += size[entry];
  }
  return { owner, gone, lives, changes, saved, away, never };
}

const isAbsent = (step, { gone, lives }, entry, tick) => {
  if (lives.has(entry)) return !lives.get(entry).some(([first, end]) => first <= tick && tick < end);
  const at = gone.get(entry);
  return at !== undefined && ((at[0] <= tick && tick < at[1]) || tick < step.born[entry] || step.died[entry] <= tick);
};

// Entries that calls around `node` restore, or keep for inner calls, at the tick at which `node` begins.
function restoredWith(node, owner) {
  const entries = new Set(node.call.inputs);
  for (let outer = node.parent; outer; outer = outer.parent) {
    if (outer.call.backward_begins !== node.call.backward_begins) continue;
    for (const entry of outer.call.entries) if (owner[entry] === outer.index) entries.add(entry);
    for (const inner of outer.inside) inner.call.inputs.forEach((entry) => entries.add(entry));
  }
  return entries;
}

// Rules 4 and 7: peak bytes of rerunning a call, if the units inside keep nothing.
function againBytes(step, node) {
  const { call, inside } = node;
  if (!inside.length) return call.rerun_bytes;
  const all = below(node), theirs = new Set(all.flatMap(({ call }) => [...call.entries, ...call.saved_outputs]));
  const saves = [...call.entries.filter((entry) => !call.outputs.includes(entry)), ...call.saved_outputs];
  const last = Math.max(call.first, ...inside.map((inner) => (node.stops ? inner.call.first : inner.call.end)),
    ...saves.filter((entry) => !theirs.has(entry)).map((entry) => step.born[entry]));
  const dies = new Map(between(step, call.first, last).map((entry) => [entry, step.died[entry]]));
  for (const { call: inner } of all) {
    inner.entries.forEach((entry, i) => dies.has(entry) && dies.set(entry, Math.min(dies.get(entry), inner.freed_again_at[i])));
  }
  const kept = [...inside.flatMap((inner) => inner.call.inputs), ...step.casts]; // an inner unit keeps its inputs
  for (const entry of kept) if (dies.has(entry)) dies.set(entry, Infinity);
  // The unit that the rerun stops at has already stashed its generator state.
  const begun = [...all.filter((inner) => inner.call.first < last), ...inside.filter((inner) => node.stops && inner.call.first === last)];
  const lives = [...dies].map(([entry, died]) => [step.born[entry], died, step.size[entry]]);
  return call.statistics_bytes + mostAtOnce([...lives, ...begun.map((inner) => [inner.call.first, Infinity, step.stash_bytes])]);
}

// The event before each rerun, and the most bytes held during the rerun.
function reruns(step, nest, simulated, line) {
  return nest.map((node) => {
    const tick = Math.max(node.call.backward_begins - 1, 0);
    let bytes = line[tick] - node.call.late_bytes + againBytes(step, node) + step.stash_bytes; // rule 3
    for (const entry of node.parent ? restoredWith(node, simulated.owner).difference(simulated.never) : [])
      if (isAbsent(step, simulated, entry, tick)) bytes += step.size[entry];
    return [tick, bytes];
  });
}

// Bytes freed in each block by the end of forward, minus the generator state of its checkpoints.
function freedBytes(step, units, outer, { away }) {
  const { born, died, size, forward_end_tick: border } = step, freed = new Map();
  const stash = units.filter((unit) => unit.blocks.length === 1).map((unit) =>
    [unit.blocks[0], step.stash_bytes * unit.calls.filter((call) => call.first <= border && border < call.backward_ends).length]);
  const leaving = new Map(units.map((unit) => [unit, unit.calls.flatMap((call) => call.entries).filter((entry) => away[entry])]));
  for (const unit of units) {
    const alone = !outer.has(unit) && unit.blocks.length === 1, entries = leaving.get(chain(unit, outer).at(-1) ?? unit);
    const longer = unit.calls.flatMap((call) => call.results)
      .filter(([entry, first, end]) => first <= border && border < end && died[entry] <= border).map(([entry]) => entry);
    for (const fqn of unit.blocks) {
      const windows = step.windows.get(fqn) ?? [], isIn = (entry) => windows.some(([first, end]) => first < born[entry] && born[entry] <= end);
      const state = sum(stash.filter(([block]) => (outer.size ? isWithin(block, fqn) : block === fqn)).map(([, bytes]) => bytes));
      const bytesOf = (list) => sum(list.filter(isIn).map((entry) => size[entry]));
      freed.set(fqn, (alone ? sum(entries.map((entry) => size[entry])) : bytesOf(entries)) - state - bytesOf(longer));
    }
  }
  return freed;
}

function roundHalfEven(value) {
  const whole = Math.round(value);
  return Math.abs(value % 1) === 0.5 && whole % 2 ? whole - 1 : whole;
}

// FLOPs and milliseconds of all reruns; a unit inside repeats the end of the rerun around it for itself.
function costOf(step, units, outer) {
  let flops = 0, ms = 0, overhead = 0;
  for (const unit of units) {
    const child = units.find((inner) => outer.get(inner) === unit && stopsInside(unit, inner));
    const plain = child && step.table.get(keyOf({ blocks: child.blocks })), calls = child?.n_forward ? unit.n_forward / child.n_forward : 1;
    flops = flops === null || unit.flops === null ? null : flops + unit.flops - (child ? roundHalfEven(plain.flops * calls) : 0);
    ms = ms === null || unit.ms === null ? null : ms + unit.ms - (child ? calls * plain.ms : 0);
    overhead += unit.overhead_ms;
  }
  return {
    flopRatio: flops === null || !step.total_flops ? null : 1 + flops / step.total_flops,
    timeRatio: ms === null || !step.step_ms || step.rerun_scale === null ? null : 1 + (ms * step.rerun_scale + overhead) / step.step_ms,
  };
}

// Why the units are not forecast; empty where they are.
function refusalOf(step, policy, outer) {
  const nested = [...outer].flat().some((unit) => unit.save_ops?.length);
  if (nested) return "The forecast does not cover kept operators inside or around another unit.";
  const named = policy.flatMap((unit) => unit.blocks);
  if (new Set(named).size < named.length) return "This page does not predict segments inside segments; the app does.";
  const strange = policy.find((unit) => !step.table.has(keyOf(unit)));
  if (strange) return `This page has no tables for ${strange.blocks.join(" and ")}${strange.save_ops?.length ? " with these operators" : ""}.`;
  return policy.map((unit) => step.table.get(keyOf(unit)).refusal).find(Boolean) ?? "";
}

// The figures of a policy: a list of units { blocks, save_ops }. A figure that is not predicted is null.
function forecast(step, policy) {
  const refusal = refusalOf(step, policy, enclosing(policy));
  if (refusal) return { refusal, line: null, peak: null, saved: null, flopRatio: null, timeRatio: null, freed: new Map() };
  const units = policy.map((unit) => step.table.get(keyOf(unit)));
  const outer = enclosing(units), nest = nestOf(units, outer), simulated = simulate(step, nest);
  const line = lineOf(simulated.changes, step.line.length, step.line);
  for (const [tick, bytes] of reruns(step, nest, simulated, line.slice())) line[tick] = Math.max(line[tick], bytes);
  const saved = step.saved_after_forward_bytes === null ? null : step.saved_after_forward_bytes + simulated.saved;
  return { refusal, line, peak: line.reduce((a, b) => Math.max(a, b), 0), saved, ...costOf(step, units, outer),
    freed: freedBytes(step, units, outer, simulated) };
}
