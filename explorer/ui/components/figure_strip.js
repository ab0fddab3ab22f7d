// One box a figure: label with its help, value, change, origin. Text reaches the page through textContent alone.
// The boxes stay, and only words change: a box that has the focus keeps it.
function piece(parent, kind, className) {
  const made = document.createElement(kind)
  made.className = className
  return parent.appendChild(made)
}

function figure(_, i) {
  const box = document.createElement("div")
  box.className = "figure"
  const head = piece(box, "div", "label")
  head.tabIndex = 0
  head.setAttribute("aria-describedby", `help-${i}`)
  const tip = piece(box, "div", "tip")
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
  piece(box, "div", "value")
  const last = piece(box, "div", "last")
  piece(last, "span", "delta")
  piece(last, "span", "below")
  return box
}

function fill(box, { label, value, delta, colour, help, below }) {
  box.dataset.figure = label
  for (const [name, text] of Object.entries({ label, tip: help, value, delta, below })) {
    const part = box.querySelector(`.${name}`)
    const words = text || "\u00a0" // as high as a word, so that nothing moves when a word appears
    if (part.textContent !== words) part.textContent = words
  }
  const change = box.querySelector(".delta")
  change.className = `delta ${colour}`
  change.hidden = !delta
}

export default function ({ data: [{ cells, about }], parentElement }) {
  const strip = parentElement.querySelector(".strip")
  const show = (cells) => {
    if (strip.children.length !== cells.length) {
      strip.replaceChildren(...cells.map(figure))
      strip.style.setProperty("--n", cells.length)
    }
    cells.forEach((cell, i) => fill(strip.children[i], cell))
  }
  const desk = about && globalThis.explorerDesk
  if (desk) Object.assign(desk, { strip: show, styles: getComputedStyle(strip), tints: {} })
  if (!desk?.isAhead(about) || !strip.firstChild) show(cells) // rule 3 of desk.js
}
