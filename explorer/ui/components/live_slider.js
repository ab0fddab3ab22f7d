// A slider that says each step while it is dragged; Streamlit's own speaks when it is let go.
// The browser owns the place while somebody holds it; Python's word counts at any other time.
const views = new WeakMap()

const OUTSIDE = ["pointerdown", "click", "keydown"] // as in graph.js

export default function ({ data: [data], parentElement, setStateValue }) {
  let v = views.get(parentElement)
  if (!v) {
    const input = parentElement.querySelector("input")
    v = { input, output: parentElement.querySelector("output"), held: false, n: 0 }
    const letGo = () => {
      if (v.held) v.desk?.flush(v)
      v.held = false
    }
    input.addEventListener("pointerdown", () => { v.held = true })
    for (const kind of ["pointerup", "pointercancel", "change"]) input.addEventListener(kind, letGo)
    input.addEventListener("input", () => {
      v.say()
      v.n = Math.max(Date.now(), v.n + 1) // grows, also when it is mounted anew
      const move = { place: Number(input.value), version: v.version, n: v.n }
      const tell = () => v.send("at", move)
      v.desk ? v.desk.change(v, { moved: v.n, move: { ...move, seq: v.desk.clicked() } }, tell) : tell()
    })
    v.onpress = (event) => event.composedPath().includes(input) || v.desk?.flush(v)
    for (const kind of OUTSIDE) document.addEventListener(kind, v.onpress, true)
    views.set(parentElement, v)
  }
  v.send = setStateValue
  v.desk = data.heard === undefined ? null : globalThis.explorerDesk
  v.version = data.version
  v.say = () => {
    const label = data.labels[v.input.value] ?? ""
    v.output.textContent = label
    v.input.setAttribute("aria-valuetext", label)
  }
  v.input.setAttribute("aria-label", data.name)
  parentElement.querySelector(".name").textContent = data.name
  v.input.max = Math.max(data.labels.length - 1, 0)
  v.input.disabled = data.labels.length < 2
  if (!v.held && !(data.heard < v.n)) v.input.value = data.at
  v.say()
  return () => {
    if (parentElement.isConnected) return // rule 7 of graph.js
    for (const kind of OUTSIDE) document.removeEventListener(kind, v.onpress, true)
    views.delete(parentElement)
  }
}
