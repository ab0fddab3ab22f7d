"use strict";
// Draws each figure when it comes near the window, in the colours of the scheme, and all of them before printing.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const fonts = () => ({
  "font.color": colour("--quiet"), "title.font.color": colour("--ink"), "legend.font.color": colour("--ink"),
  "hoverlabel.bgcolor": colour("--soft"), "hoverlabel.bordercolor": colour("--line"),
});
const drawn = new Set();
function draw(figure) {
  if (drawn.has(figure)) return;
  drawn.add(figure);
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  layout.font = { family: "system-ui, sans-serif", size: 12, ...layout.font };
  layout.title = { ...layout.title, font: { size: 16, ...layout.title?.font } };
  if (layout.title.subtitle) layout.title.subtitle.font = { size: 13 };
  const config = { displaylogo: false, responsive: true,
    modeBarButtons: [["toImage", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: figure.dataset.name } };
  const div = figure.querySelector("div");
  Plotly.newPlot(div, data, layout, config).then(() => Plotly.relayout(div, fonts()))
    .then(() => figure.dispatchEvent(new Event("drawn")));
}
const charts = document.querySelectorAll("figure.chart");
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
}, { rootMargin: "800px" });
charts.forEach((figure) => near.observe(figure));
window.addEventListener("beforeprint", () => charts.forEach(draw));
dark.addEventListener("change", () => drawn.forEach((figure) => Plotly.relayout(figure.querySelector("div"), fonts())));
