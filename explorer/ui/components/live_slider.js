// A slider that says each step while it is dragged; Streamlit's own speaks when it is let go.
// The browser owns the place while somebody holds it or a step is under way; Python's word counts at any other time.
const views = new WeakMap()

const HELD_MS = 1000 // a rerun takes a slow machine half a second, in which the page does not follow the slider

export default function ({ data: [data], parentElement }) {
  let v = views.get(parentElement)
  const isNew = !v
  if (isNew) {
    const input = parentElement.querySelector("input")
    v = { input, output: parentElement.querySelector("output"), held: false }
    const letGo = () => {
      if (v.held) v.desk?.flush()
      v.held = false
    }
    input.addEventListener("pointerdown", () => { v.held = true })
    for (const kind of ["pointerup", "pointercancel", "change"]) input.addEventListener(kind, letGo)
    input.addEventListener("input", () => {
      v.say()
      if (!v.desk) return
      v.desk.place = Number(input.value)
      v.desk.act({ kind: "place", place: v.desk.place, version: v.version }, v.held ? HELD_MS : undefined)
    })
    views.set(parentElement, v)
  }
  v.desk = globalThis.explorerDesk
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
  const isAhead = v.desk?.isAhead(data.about)
  if (isAhead && isNew) v.input.value = v.desk.place ?? data.at // moved in the preview
  if (!isAhead && !v.held) v.input.value = data.at
  v.say()
}
