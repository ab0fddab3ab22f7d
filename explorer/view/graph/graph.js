// Draws the boxes where explorer/view/graph/geometry.py put them and keeps the marks between two answers of the server.
//
// 1. What a person does is a list of numbered steps: marks that are flipped, a preset, an undo. What a step shows without
//    the server is shown at once. The server is sent all steps that it is not known to have taken over.
// 2. The server answers with its marks and the number of the last step that it has taken over; what is drawn is always
//    that answer with the later flips on top. So an old answer undoes no step.
// 3. A step says what to change, not what to end with. A preset from elsewhere and a click that crosses it both count.
// 4. Streamlit may hand a step and a press outside to the server in one rerun, where their order is gone. So a message has
//    the number of the last step before the last press outside. Such a press sends the steps under way at once. What the
//    press does comes behind those steps.
// 5. Text reaches the page through textContent and setAttribute alone: a module may have any name.
// 6. A page with a desk (ui/components/desk.js) answers steps before the server does: the server is told at rest, or at
//    a press outside. Tools and slider add steps here. Until the server knows all of them, labels are those of the desk's
//    answer, and so are the marks behind a step that only the server can take, such as undo.
// 7. Streamlit ends a call as soon as the next answer has overtaken the call's import of this file. The graph still
//    stands then, and keeps its view; a view goes with its place in the document. The steps under way stay with the desk:
//    Streamlit may draw the graph in another place.
// 8. The document draws a graph that is `early`, before Streamlit is there. The page's own graph, once it is drawn, takes
//    over the steps that were done there; from then on clicks reach the page's graph, which lies below.

const views = new WeakMap()
const NARROW = 900 // pixels of width below which graph and charts stand one above the other
const OUTSIDE = ["pointerdown", "click", "keydown"] // a press by mouse, by script, by key
const PARTS = ".graph, .segment, .tools, .slide" // a press there is a step, or none
const LOOKS = ["open", "select", "jump"] // steps that change no policy: only a rerun draws them
const FLIPS = ["on", "cuts", ...LOOKS] // steps that show without the server
const SVG = "http://www.w3.org/2000/svg"
const WORDS = { true: "recompute", false: "keep", inside: "recomputed", every: "all inside", some: "part inside" }

function element(tag, className, act) {
  const made = document.createElement(tag)
  if (className) made.className = className
  if (act) made.dataset.act = act
  return made
}

function button(className, act, text, title) {
  const made = element("button", className, act)
  made.type = "button"
  made.tabIndex = -1
  made.textContent = text
  made.title = title
  made.setAttribute("aria-label", title) // the glyph says nothing aloud
  return made
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text
}

function say(node, attribute, value) {
  if (node.getAttribute(attribute) !== `${value}`) node.setAttribute(attribute, value)
}

// ---- drawing: only when the shape changes

function drawRow([id, name, kind, depth, top, height, left, right, flags, members, nCalls, nInside]) {
  const box = element("div", "row")
  const [toggles, foldable, open] = [flags & 1, flags & 2, flags & 4]
  box.dataset.id = id
  box.style.cssText = `top:${top}px;height:${height}px;left:${left}px;right:${right}px`
  box.setAttribute("role", "treeitem")
  box.setAttribute("aria-level", depth + 1)
  if (foldable) box.setAttribute("aria-expanded", !!open)
  box.tabIndex = -1
  box.classList.toggle("toggles", !!toggles)
  box.classList.toggle("open", !!open)

  const first = element("div", "line")
  const second = element("div", "line small")
  const v = { box, id, members, toggles, foldable, open, name, kind, nCalls, nInside, top, bottom: top + height, cells: [] }
  if (foldable) first.append(button("fold", "fold", open ? "▾" : "▸", `${open ? "Fold" : "Unfold"} ${name}`))
  v.label = element("span", "name")
  v.label.textContent = name
  first.append(v.label)
  const times = element("span", "times")
  times.textContent = [members.length && `×${members.length}`, nCalls > 1 && `called ${nCalls}×`].filter(Boolean).join(" ")
  if (times.textContent) first.append(times)
  v.badges = element("span", "badges")
  v.bytes = element("span", "bytes")
  first.append(v.badges, v.bytes)
  if (toggles && !members.length) {
    v.chip = element("span", "chip")
    first.append(v.chip)
  }
  const sort = element("span", "kind")
  sort.textContent = kind
  v.note = element("span", "note")
  second.append(sort)
  if (foldable && !open && !members.length) second.append((v.inside = element("span", "count")))
  if (members.length && !open) {
    const strip = element("span", "cells")
    for (const fqn of members.length <= 24 ? members : []) {
      const cell = button("cell", "cell", "", `Recompute ${fqn}?`)
      cell.dataset.fqn = fqn
      strip.append(cell)
      v.cells.push(cell)
    }
    v.count = element("span", "count")
    strip.append(v.count)
    second.append(strip)
  }
  second.append(v.note)
  if (members.length) {
    second.append(
      button("all", "all", "all", `Recompute all ${members.length} of these`),
      button("all", "none", "none", `Keep all ${members.length} of these`),
    )
  }
  if (toggles || members.length) second.append(button("pick", "pick", "◎", `Show the bytes of ${name} in the charts`))
  box.append(first, second)
  v.heat = element("div", "heat")
  box.append(v.heat)
  return v
}

function drawJoin([id, sign, top, height, left, right, beside]) {
  const join = element("div", beside ? "join beside" : "join")
  join.style.cssText = `top:${top}px;height:${height}px;left:${left}px;right:${right}px`
  join.setAttribute("aria-hidden", "true") // what flows is said by the boxes
  const text = element("span", "sign")
  text.textContent = sign
  text.title = id.replace(/^:/, "")
  join.append(text)
  return join
}

function drawPath(className, way) {
  const path = document.createElementNS(SVG, "path")
  path.setAttribute("class", className)
  path.setAttribute("d", way)
  return path
}

// An arrow to a neighbour hangs from the left, one through a lane from the right: the drawing may have any width.
function drawLink([kind, start, end, lane, from, to, lines, title]) {
  const svg = document.createElementNS(SVG, "svg")
  const [top, bottom] = [Math.min(start, end), Math.max(start, end)]
  const next = kind === "next"
  const width = next ? 24 : Math.max(from, to) - lane + 12
  const x = (inset) => (next ? inset : width - 6 - (inset - lane))
  svg.setAttribute("class", `link ${kind}`)
  svg.setAttribute("width", width)
  svg.setAttribute("height", bottom - top + 12)
  svg.style.cssText = `top:${top - 6}px;` + (next ? `left:${lane - 12}px` : `right:${lane - 6}px`)
  const [y1, y2] = [start - top + 6, end - top + 6]
  for (let i = 0; i < lines; i++) {
    const side = 2.5 * (i - (lines - 1) / 2)
    const way = next
      ? [`M${12 + 2 * side},${y1}V${y2 - 6}`, `M${12 + 2 * side},${y2}l-3.5,-6h7z`]
      : [
          `M${x(from)},${y1 + side}H${x(lane) + side}V${y2 + side}H${x(to) + 6}`,
          `M${x(to)},${y2 + side}l6,-3.5v7z`,
        ]
    svg.append(drawPath("wire", way[0]), drawPath("head", way[1]))
  }
  const name = document.createElementNS(SVG, "title")
  name.textContent = title
  svg.append(name)
  return svg
}

function drawCut([id, top, left, right, title, refused]) {
  const cut = element("div", "cut", "cut")
  cut.dataset.cut = id
  cut.style.cssText = `top:${top}px;left:${left}px;right:${right}px`
  cut.title = title
  cut.setAttribute("role", "checkbox")
  cut.setAttribute("aria-label", `${title}, between ${id.replace(">", " and ")}`)
  cut.setAttribute("aria-disabled", !!refused)
  cut.tabIndex = 0 // a refused one too: its reason is read out
  const text = element("span", "scissors")
  text.textContent = title
  cut.append(text)
  return cut
}

function draw(v, geometry) {
  const focused = v.root.contains(v.root.getRootNode().activeElement) ? v.at : null
  const sheet = element("div", "sheet")
  sheet.style.height = `${geometry.height}px`
  v.nodes = new Map(geometry.rows.map((row) => [row[0], drawRow(row)]))
  v.cutNodes = new Map(geometry.cuts.map((cut) => [cut[0], drawCut(cut)]))
  sheet.append(...[...v.nodes.values()].map((node) => node.box))
  sheet.append(...geometry.joins.map(drawJoin), ...geometry.links.map(drawLink), ...v.cutNodes.values())
  const scroll = v.root.scrollTop
  v.root.replaceChildren(sheet)
  v.root.scrollTop = scroll
  if (!v.nodes.has(v.at)) v.at = geometry.rows[0]?.[0]
  rove(v, v.at, focused !== null)
}

// ---- marking: after every click and every answer

function stateOf(v, node) {
  if (!node.members.length) return v.on.has(node.id)
  const n = node.members.filter((fqn) => v.on.has(fqn)).length
  return n === 0 ? false : n === node.members.length ? true : "mixed"
}

// The block around `id` that is recomputed, and `id` with it.
function around(v, id) {
  const parts = id.split(".")
  for (let n = parts.length - 1; n > 0; n--) {
    const outer = parts.slice(0, n).join(".")
    if (v.on.has(outer)) return outer
  }
}

function chosenBelow(v, ids) {
  return [...v.on].filter((fqn) => ids.some((id) => fqn.startsWith(`${id}.`))).length
}

function mark(v) {
  for (const node of v.nodes.values()) {
    if (node.toggles || node.members.length) say(node.box, "aria-checked", stateOf(v, node))
    say(node.box, "aria-selected", v.selected === node.id)
    const outer = around(v, node.members[0] || node.id)
    node.box.classList.toggle("within", !!outer)
    // How many blocks inside a box are chosen, of those that presets count.
    const n = node.foldable ? chosenBelow(v, [node.id]) : 0
    const below = n ? `${n}${n <= node.nInside ? ` of ${node.nInside}` : ""} inside recomputed` : ""
    say(node.box, "aria-description", outer ? `recomputed with ${outer}` : below)
    if (node.chip) {
      const whole = node.nInside && n >= node.nInside
      const kept = outer ? WORDS.inside : !n ? WORDS.false : whole ? WORDS.every : WORDS.some
      put(node.chip, v.on.has(node.id) ? v.actions.get(node.id) || WORDS.true : kept)
      node.chip.title = outer ? `Runs again with ${outer}` : below
    }
    for (const cell of node.cells) cell.classList.toggle("on", v.on.has(cell.dataset.fqn))
    if (node.count) markRun(v, node, outer)
    if (node.inside) put(node.inside, below)
  }
  for (const [id, cut] of v.cutNodes) say(cut, "aria-checked", v.cuts.has(id))
}

function markRun(v, node, outer) {
  const n = node.members.filter((fqn) => v.on.has(fqn)).length
  const below = chosenBelow(v, node.members)
  const own = outer && !n ? WORDS.inside : `${n} of ${node.members.length}`
  put(node.count, below ? `${own}, ${below} inside them` : own)
}

function paint(v, data) {
  v.actions = new Map(Object.entries(data.actions || {})) // a block may be called constructor
  const labels = new Map(Object.entries(data.labels))
  const colour = data.colours.recompute
  if (v.colour !== colour) v.root.style.setProperty("--recompute", (v.colour = colour)) // it styles every row anew
  const joined = new Map()
  for (const segment of data.segments || [])
    segment.forEach((id, i) => joined.set(id, i === 0 ? "first" : i === segment.length - 1 ? "last" : "middle"))
  const stages = data.colours.stages
  for (const [id, node] of v.nodes) {
    const label = (node.texts = labels.get(id) || node.texts || ["", "", [], "", 0, null, ""])
    const stage = label[5] === null ? "" : stages[label[5] % stages.length]
    const drawn = JSON.stringify([label, stage, joined.get(id)])
    if (drawn !== node.drawn) paintRow(node, label, stage, joined.get(id) || "")
    node.drawn = drawn
  }
}

function paintRow(node, [bytes, note, badges, title, heat, , bar], stage, joined) {
  put(node.bytes, bytes)
  put(node.note, note)
  node.box.title = title
  node.box.setAttribute("aria-label", [node.name, node.kind, bytes, note, bar].filter(Boolean).join(", "))
  node.heat.style.width = node.heatWidth = `${Math.round(100 * heat)}%`
  node.badges.replaceChildren(
    ...badges.map(([sign, severity, text]) => {
      const badge = element("span", `badge ${severity}`)
      badge.textContent = sign
      badge.title = text
      badge.setAttribute("aria-label", text)
      return badge
    }),
  )
  node.box.dataset.joined = joined
  node.box.classList.toggle("staged", !!stage)
  node.box.style.setProperty("--stage", stage)
}

// ---- what a person does

// The server's marks of one kind, with the steps behind number `last` that flip them (rule 2).
function flipped(v, kind, marks, last = 0) {
  const set = new Set(marks)
  for (const step of v.list.steps) if (step.kind === kind && step.n > last) xor(set, step.ids)
  return set
}

function act(v, step, rest) {
  if (step.kind === "place" && v.list.steps.at(-1)?.kind === "place") v.list.steps.pop() // of one drag
  v.list.steps.push({ n: ++v.list.n, ...step })
  if (v.desk && !LOOKS.includes(step.kind)) v.desk.changed(v.list.n, rest) // rule 6
  else tell(v)
}

function tell(v) {
  v.desk?.isTold()
  v.emit("steps", { list: v.list.steps, press: v.list.press })
}

// Rows in view, and those within a screen of them: a rerun draws the others soon enough.
function inView(v) {
  const [first, last] = [v.scrolled - v.height, v.scrolled + 2 * v.height]
  return [...v.nodes.values()].filter(({ top, bottom }) => bottom > first && top < last).map(({ id }) => id)
}

// What the desk asks, and draws of the answer to the steps up to number `last`.
function forDesk(v) {
  const question = () => ({ graph: v.key, steps: v.list.steps, rows: inView(v) })
  const draw = (answer, last) => {
    v.on = flipped(v, "on", answer.on, last)
    paint(v, { ...answer, colours: v.colours })
    offer(v, answer.join)
    mark(v)
  }
  const takeOver = () => {
    if (v.isEarly) v.root.style.pointerEvents = "none"
    return v.isEarly ? v.list.steps : [] // rule 8
  }
  // A name that is drawn is found without the server.
  const jumpTo = (id) => (v.nodes.has(id) ? jump(v, id) : act(v, { kind: "jump", ids: [id] }))
  return { question, draw, takeOver, act: (step, rest) => act(v, step, rest), jumpTo, tell: () => tell(v) }
}

function jump(v, id) {
  rove(v, id, false)
  const { box } = v.nodes.get(id)
  v.root.scrollTop = box.offsetTop - v.root.clientHeight / 2 + 20
  box.classList.add("found")
  setTimeout(() => box.classList.remove("found"), 1600)
}

function offer(v, join) {
  if (!v.segment) return
  v.join = join ?? []
  v.segment.hidden = !v.join.length
  put(v.segment.lastChild, `Recompute ${v.join.join(" and ")} as one segment`)
}

function onPress(v, event) {
  if (event.composedPath().some((e) => e.matches?.(PARTS)) || !v.list.steps.length || v.list.press === v.list.n) return
  v.list.press = v.list.n
  tell(v) // rule 4
}

function toggle(v, node) {
  if (node.members.length && !node.toggles) return setAll(v, node, stateOf(v, node) !== true)
  if (!node.toggles) return node.foldable && fold(v, node)
  flip(v, "on", [node.id])
}

function setAll(v, node, on) {
  flip(v, "on", node.members.filter((fqn) => v.on.has(fqn) !== on))
}

function fold(v, node) {
  const opening = !v.open.has(node.id)
  opening ? v.open.add(node.id) : v.open.delete(node.id)
  node.box.setAttribute("aria-expanded", opening)
  act(v, { kind: "open", ids: [node.id] })
}

function pick(v, id) {
  v.selected = v.selected === id ? "" : id
  mark(v)
  act(v, { kind: "select", ids: v.selected ? [v.selected] : [] })
}

const xor = (set, ids) => ids.forEach((id) => set.delete(id) || set.add(id))

function flip(v, kind, ids) {
  if (!ids.length) return
  xor(v[kind], ids)
  mark(v)
  act(v, { kind, ids })
}

function rove(v, id, focus) {
  const node = v.nodes.get(id)
  if (!node) return
  v.nodes.get(v.at)?.box.setAttribute("tabindex", "-1")
  v.at = id
  node.box.tabIndex = 0
  if (focus) node.box.focus({ preventScroll: true })
  if (focus) node.box.scrollIntoView({ block: "nearest" })
}

function onClick(v, event) {
  const target = event.target
  const cut = target.closest("[data-cut]")
  if (cut) return cut.getAttribute("aria-disabled") === "true" || flip(v, "cuts", [cut.dataset.cut])
  const box = target.closest("[data-id]")
  if (!box) return
  const node = v.nodes.get(box.dataset.id)
  rove(v, node.id, false)
  const act = target.closest("[data-act]")?.dataset
  if (!act) return toggle(v, node)
  if (act.act === "fold") return fold(v, node)
  if (act.act === "pick") return pick(v, node.id)
  if (act.act === "cell") return flip(v, "on", [act.fqn])
  setAll(v, node, act.act === "all")
}

function onKey(v, event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return
  const cut = event.target.closest("[data-cut]")
  const key = event.key
  if (cut) {
    if (key !== " " && key !== "Enter") return
    event.preventDefault()
    return cut.getAttribute("aria-disabled") === "true" || flip(v, "cuts", [cut.dataset.cut])
  }
  const node = v.nodes.get(v.at)
  if (!node) return
  const ids = [...v.nodes.keys()]
  const here = ids.indexOf(v.at)
  const parent = ids.slice(0, here).reverse().find((id) => level(v, id) < level(v, v.at))
  const moves = {
    ArrowDown: () => rove(v, ids[Math.min(here + 1, ids.length - 1)], true),
    ArrowUp: () => rove(v, ids[Math.max(here - 1, 0)], true),
    Home: () => rove(v, ids[0], true),
    End: () => rove(v, ids[ids.length - 1], true),
    ArrowRight: () => {
      if (node.foldable && !v.open.has(node.id)) fold(v, node)
      else if (v.nodes.has(ids[here + 1]) && level(v, ids[here + 1]) > level(v, v.at)) rove(v, ids[here + 1], true)
    },
    ArrowLeft: () => {
      if (node.foldable && v.open.has(node.id)) fold(v, node)
      else if (parent !== undefined) rove(v, parent, true)
    },
    " ": () => toggle(v, node),
    Enter: () => toggle(v, node),
    i: () => pick(v, node.id),
  }
  if (!moves[key]) return
  event.preventDefault()
  moves[key]()
}

// ---- a film of a step (ui/components/film.js): each row shows what its blocks hold, the block at work its phase

const isWithin = (fqn, ids) => ids.some((id) => fqn === id || fqn.startsWith(`${id}.`))

function heldWithin(frame, ids) {
  const rows = frame.rows.filter(({ fqns }) => fqns.some((fqn) => isWithin(fqn, ids)))
  const [held, most] = ["held", "most"].map((kind) => rows.reduce((sum, row) => sum + row[kind], 0))
  const atWork = frame.rows[frame.row]?.fqns ?? []
  return { held, most, phase: atWork.some((fqn) => isWithin(fqn, ids)) ? frame.phase : "" }
}

function showFrame(v, frame) {
  v.root.classList.toggle("film", !!frame)
  const closed = [...v.nodes.values()].filter(({ open }) => !open)
  const none = { held: 0, most: 0, phase: "" }
  const shown = closed.map((node) => [node, frame ? heldWithin(frame, node.members.length ? node.members : [node.id]) : none])
  const largest = Math.max(...shown.map(([, { most }]) => most), 1)
  v.root.style.setProperty("--phase", frame?.colour ?? "")
  for (const [node, { held, phase }] of shown) {
    node.heat.style.width = frame ? `${(100 * held) / largest}%` : node.heatWidth
    node.box.dataset.phase = phase
    for (const cell of node.cells) {
      const inside = frame ? heldWithin(frame, [cell.dataset.fqn]) : none
      cell.style.setProperty("--full", inside.most ? `${(100 * inside.held) / inside.most}%` : "0%")
      cell.dataset.phase = inside.phase
    }
  }
}

const level = (v, id) => Number(v.nodes.get(id).box.getAttribute("aria-level"))

// The server cannot see the window: it is told at first, and when the page is laid out for a much different one.
function onResize(v) {
  if (!v.window) return
  const seen = { height: window.innerHeight, narrow: window.innerWidth < NARROW }
  const near = Math.abs(seen.height - v.window.height) <= 80 && seen.narrow === v.window.narrow
  if (near && v.window.known) return
  v.emit("window", seen)
  v.window = { ...seen, known: true }
}

export default function ({ data: [data], parentElement, setStateValue }) {
  let v = views.get(parentElement)
  const isFirst = !v
  if (isFirst) {
    v = { root: parentElement.querySelector(".graph"), nodes: new Map(), cutNodes: new Map(), actions: new Map() }
    Object.assign(v, { selected: "", scrolled: 0, isEarly: data.early })
    v.asked = forDesk(v)
    v.root.onclick = (event) => onClick(v, event)
    v.root.onkeydown = (event) => onKey(v, event)
    v.root.onscroll = () => (v.scrolled = v.root.scrollTop) // to ask later would lay out the page in the midst of a click
    // No property of this name is a handler in Chromium.
    v.root.addEventListener("focusin", ({ target }) => target.dataset.id !== undefined && rove(v, target.dataset.id, false))
    v.segment = parentElement.querySelector(".segment")
    if (v.segment) v.segment.onclick = () => act(v, { kind: "join", ids: v.join })
    v.onpress = (event) => onPress(v, event)
    for (const kind of OUTSIDE) document.addEventListener(kind, v.onpress, true)
    v.onframe = ({ detail }) => showFrame(v, detail)
    document.addEventListener("step-frame", v.onframe)
    v.onresize = () => onResize(v)
    window.addEventListener("resize", v.onresize)
    views.set(parentElement, v)
    v.list = data.desk ? globalThis.explorerDesk.listOf(data) : { steps: [], n: 0, press: 0 }
  }
  v.emit = setStateValue
  v.root.style.maxHeight = `${data.height}px`
  if (!v.window || !data.window?.known) v.window = data.window
  onResize(v)
  v.desk = data.desk && globalThis.explorerDesk
  const isNew = v.shape !== data.shape
  v.list.steps = v.list.steps.filter(({ n }) => n > data.taken)
  v.list.n = Math.max(v.list.n, data.taken + v.list.steps.length)
  v.cuts = flipped(v, "cuts", data.cuts)
  v.open = flipped(v, "open", data.open)
  const picked = v.list.steps.findLast(({ kind }) => kind === "select")
  v.selected = picked ? picked.ids.join("") : data.selected
  if (isFirst || v.list.steps.every(({ kind }) => FLIPS.includes(kind))) v.on = flipped(v, "on", data.on)
  if (isNew) {
    draw(v, data.geometry)
    v.shape = data.shape
  }
  Object.assign(v, { key: data.desk, colours: data.colours, height: data.height })
  const isAhead = v.desk?.heard(data, v.asked) // rule 6
  if (!isAhead || isNew) paint(v, data)
  if (!isAhead) offer(v, data.join)
  if (isFirst && v.list.steps.length) v.desk?.changed(v.list.n)
  else if (isAhead) v.desk.askAgain()
  mark(v)
  if (data.jump && data.jump.n !== v.jump && v.nodes.has(data.jump.id)) {
    v.jump = data.jump.n
    jump(v, data.jump.id)
  }
  return () => {
    if (parentElement.isConnected) return // rule 7
    for (const kind of OUTSIDE) document.removeEventListener(kind, v.onpress, true)
    document.removeEventListener("step-frame", v.onframe)
    window.removeEventListener("resize", v.onresize)
    v.desk?.leave(v.asked)
    views.delete(parentElement)
  }
}
