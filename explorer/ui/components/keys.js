// Keys of every page, and the list of them.
// Streamlit's own shortcuts also act on a person who types, where Ctrl+Z takes back letters; and their hints are faint.
const SHORTCUTS = { z: "undo", "shift+z": "redo", y: "redo", enter: "run" }
const views = new WeakMap()

const isTyping = (event) =>
  event.composedPath()[0].closest?.("input:not([type=range]), textarea, [contenteditable=true]")

function press(name) {
  const found = document.querySelectorAll(`.st-key-${name} button, .st-key-pipeline_${name} button`)
  const button = [...found, globalThis.explorerDesk?.buttons?.[name]].find((each) => each?.checkVisibility() && !each.disabled)
  button?.click()
  return !!button
}

function onKey(sheet, event) {
  if (event.altKey || isTyping(event)) return
  const isShortcut = event.ctrlKey || event.metaKey
  const name = SHORTCUTS[(event.shiftKey ? "shift+" : "") + event.key.toLowerCase()]
  if (isShortcut && name && press(name)) event.preventDefault()
  if (!isShortcut && event.key === "?" && !sheet.open) sheet.showModal()
}

export default function ({ parentElement }) {
  if (!views.has(parentElement)) {
    const sheet = parentElement.querySelector("dialog")
    const listen = (event) => onKey(sheet, event)
    // A press beside the sheet has the sheet itself as its target.
    sheet.onclick = ({ target }) => (target === sheet || target.closest("button")) && sheet.close()
    document.addEventListener("keydown", listen)
    views.set(parentElement, listen)
  }
  return () => {
    if (parentElement.isConnected) return // rule 7 of graph.js
    document.removeEventListener("keydown", views.get(parentElement))
    views.delete(parentElement)
  }
}
