// Controls in sight and words on the page, shadow roots included. A group that is one choice is one control: the strip
// of cells of a folded group, radio buttons, a field with its arrow. What is faded out until it is pointed at is not
// in sight.
() => {
  const CONTROLS = "a[href], button, input, select, textarea, summary, [role=tab], [role=slider], [role=switch], [role=treeitem]"
  const GROUPS = ".cells, [role=radiogroup], [data-baseweb=select], [data-testid=stSelectbox], [data-testid=stTextInput], [data-testid=stNumberInput]"
  const every = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? every(e.shadowRoot) : [])])
  const around = (e) => e.parentElement ?? e.getRootNode().host ?? null
  const inSight = (e) => {
    const { width, height, top, bottom } = e.getBoundingClientRect()
    if (width < 2 || height < 2 || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true })) return false
    for (let box = around(e); box; box = around(box)) {
      if (!/auto|scroll/.test(getComputedStyle(box).overflowY)) continue
      const within = box.getBoundingClientRect()
      if (bottom <= within.top || top >= within.bottom) return false
    }
    return bottom > 0 && top < innerHeight
  }
  const name = (e) => (e.getAttribute("aria-label") || e.innerText || e.className || e.tagName).replaceAll("\n", " ").slice(0, 40)
  const controls = new Map(every(document).filter((e) => e.matches(CONTROLS) && inSight(e)).map((e) => [e.closest(GROUPS) ?? e, name(e)]))
  const words = document.querySelector('[data-testid="stApp"]').innerText.trim().split(/\s+/).length
  return { controls: [...controls.values()], words }
}
