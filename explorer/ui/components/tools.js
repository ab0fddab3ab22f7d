// Presets with their effects, undo, redo, search. Each press is a step of the graph (graph.js), answered as a click is.
// The menu is a popover: the browser closes it at Escape and at a press beside it.
const views = new WeakMap()
const MOVES = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }

function drawPresets(v, presets) {
  while (v.menu.children.length > presets.length) v.menu.lastChild.remove()
  presets.forEach(([name, title], i) => {
    const item = v.menu.children[i] ?? v.menu.appendChild(document.createElement("button"))
    item.type = "button"
    item.tabIndex = -1
    item.setAttribute("role", "menuitem")
    item.dataset.preset = name
    if (item.textContent !== title) item.textContent = title
  })
}

function show(v, { presets, undo, redo }) {
  drawPresets(v, presets)
  v.buttons.undo.hidden = !undo
  v.buttons.redo.hidden = !redo
}

function open(v) {
  const at = v.presets.getBoundingClientRect()
  v.menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - v.menu.offsetWidth - 8))}px`
  const below = at.bottom + 4
  v.menu.style.top = `${below + v.menu.offsetHeight < innerHeight ? below : Math.max(8, at.top - v.menu.offsetHeight - 4)}px`
  v.menu.firstChild?.focus()
}

function onKey(v, event) {
  if (!(event.key in MOVES)) return
  event.preventDefault()
  const items = [...v.menu.children]
  const next = items.indexOf(event.target) + MOVES[event.key]
  items[Math.max(0, Math.min(next, items.length - 1))].focus()
}

function search(v) {
  const text = v.input.value.trim()
  if (!text) return
  v.input.value = ""
  if (v.names.has(text)) v.desk.graph?.jumpTo(text)
  else v.desk.act({ kind: "match", ids: [text] })
}

function make(parentElement) {
  const [presets, menu, undo, redo, input] = [".presets", ".menu", ".undo", ".redo", "input"].map((part) =>
    parentElement.querySelector(part),
  )
  const v = { presets, menu, buttons: { undo, redo }, input, list: parentElement.querySelector("datalist") }
  for (const kind of ["undo", "redo"]) v.buttons[kind].onclick = () => v.desk.act({ kind })
  menu.onbeforetoggle = ({ newState }) => {
    if (newState === "closed" && menu.matches(":focus-within")) presets.focus()
  }
  menu.ontoggle = ({ newState }) => {
    presets.setAttribute("aria-expanded", newState === "open")
    if (newState === "open") open(v)
  }
  menu.onkeydown = (event) => onKey(v, event)
  menu.onclick = ({ target }) => {
    menu.hidePopover()
    if (target.dataset.preset) v.desk.act({ kind: "preset", ids: [target.dataset.preset] })
  }
  input.onchange = () => search(v)
  return v
}

export default function ({ data: [data], parentElement }) {
  let v = views.get(parentElement)
  if (!v) views.set(parentElement, (v = make(parentElement)))
  v.desk = globalThis.explorerDesk
  Object.assign(v.desk, { tools: (tools) => show(v, tools), buttons: v.buttons })
  if (v.list.children.length !== data.names.length || v.list.firstChild?.value !== data.names[0]) {
    v.names = new Set(data.names)
    v.list.replaceChildren(...data.names.map((name) => Object.assign(document.createElement("option"), { value: name })))
  }
  if (!v.desk.isAhead(data.about) || !v.menu.firstChild) show(v, data) // rule 3 of desk.js
}
