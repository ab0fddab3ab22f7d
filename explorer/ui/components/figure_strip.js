// One box a figure: label with its help, value, change, origin. Text reaches the page through textContent alone.
function piece(parent, kind, className, text) {
  const made = document.createElement(kind)
  made.className = className
  made.textContent = text || "\u00a0" // as high as a word, so that nothing moves when a word appears
  return parent.appendChild(made)
}

function figure({ label, value, delta, colour, help, below }, i) {
  const box = document.createElement("div")
  box.className = "figure"
  box.dataset.figure = label
  const head = piece(box, "div", "label", label)
  head.tabIndex = 0
  head.setAttribute("aria-describedby", `help-${i}`)
  const tip = piece(box, "div", "tip", help)
  tip.id = `help-${i}`
  tip.setAttribute("role", "tooltip")
  tip.popover = "manual"
  const show = () => {
    const at = head.getBoundingClientRect()
    tip.showPopover()
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`
    tip.style.top = `${at.bottom + 4}px`
  }
  const hide = () => tip.hidePopover()
  head.addEventListener("pointerenter", show)
  head.addEventListener("focus", show)
  head.addEventListener("blur", hide)
  head.addEventListener("keydown", (press) => press.key === "Escape" && hide())
  box.addEventListener("pointerleave", hide)
  piece(box, "div", "value", value)
  const last = piece(box, "div", "last", "")
  last.textContent = ""
  if (delta) piece(last, "span", `delta ${colour}`, delta)
  piece(last, "span", "below", below)
  return box
}

export default function ({ data: [{ cells, about }], parentElement }) {
  const strip = parentElement.querySelector(".strip")
  const show = (cells) => {
    const text = JSON.stringify(cells)
    if (strip.dataset.drawn === text) return
    strip.dataset.drawn = text
    strip.replaceChildren(...cells.map(figure))
    strip.style.setProperty("--n", cells.length)
  }
  const desk = about && globalThis.explorerDesk
  if (desk) Object.assign(desk, { strip: show, colours: getComputedStyle(strip) })
  if (!desk?.isAhead(about) || !strip.firstChild) show(cells) // rule 3 of desk.js
}
