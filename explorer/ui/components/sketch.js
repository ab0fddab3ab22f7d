// The document names Plotly's file (ui/server.py). The file holds a browser for a second: sketch and graph come first.
export default function ({ data: [{ drawing, loaded }], parentElement, setStateValue }) {
  parentElement.querySelector(".sketch").innerHTML = drawing
  const library = performance.getEntriesByType("resource").find(({ name }) => /PlotlyChart[^/]*js$/.test(name))
  const graph = '[class*="st-key-block_graph"]' // none where no model was read
  const roots = () => [...document.querySelectorAll(`${graph} *`)].map((e) => e.shadowRoot)
  const isDrawn = () => !document.querySelector(graph) || roots().some((root) => root?.querySelector(".graph > *"))
  const tell = () => setStateValue("plotly", true)
  const run = () => (isDrawn() ? import(library.name).finally(tell) : setTimeout(later, 50))
  const later = () => requestIdleCallback(run)
  if (!loaded) library ? later() : tell()
}
