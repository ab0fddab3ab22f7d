// A slider that says each step while it is dragged; Streamlit's own speaks when it is let go.
// The browser owns the place while somebody holds it; Python's word counts at any other time.
const views = new WeakMap()

export default function ({ data: [data], parentElement, setStateValue }) {
  let v = views.get(parentElement)
  if (!v) {
    const input = parentElement.querySelector("input")
    v = { input, output: parentElement.querySelector("output"), held: false, n: 0 }
    input.addEventListener("pointerdown", () => { v.held = true })
    input.addEventListener("pointerup", () => { v.held = false })
    input.addEventListener("pointercancel", () => { v.held = false })
    input.addEventListener("input", () => {
      v.say()
      v.send("at", { place: Number(input.value), version: v.version, n: v.n = Math.max(Date.now(), v.n + 1) }) // grows, also when it is mounted anew
    })
    views.set(parentElement, v)
  }
  v.send = setStateValue
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
  if (!v.held) v.input.value = data.at
  v.say()
  return () => parentElement.isConnected || views.delete(parentElement) // rule 6 of graph.js
}
