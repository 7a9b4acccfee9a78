// Charts by Plotly, drawn when they come into view, and in the colours of the page.

const COLOURS = ["#3b7dd8", "#d9663b", "#3a9d5d", "#a45bc4", "#c79a1b", "#2aa5a0", "#c2456b", "#7d8a97"];
const DASHES = ["solid", "dot", "dash", "dashdot"];
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
const MARKED_POINTS = 60; // of a line with more points the points are not marked
const charts = new Map(); // element -> function that returns [traces, layout]

// Plotly reads some tags in labels: text of a run has none.
function label(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mergedLayout(layout) {
  const axis = { gridcolor: colourOf("--line"), linecolor: colourOf("--line"), zerolinecolor: colourOf("--line"), automargin: true, exponentformat: "power" };
  return {
    ...layout,
    font: { color: colourOf("--text"), size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 50, r: 12, t: 8, b: 34 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    hovermode: layout.hovermode ?? "x unified",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    hoverlabel: { bgcolor: colourOf("--panel"), bordercolor: colourOf("--line"), font: { color: colourOf("--text") } },
    xaxis: { ...axis, title: { text: "step", standoff: 4 }, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
}

function drawChart(element) {
  const [traces, layout] = charts.get(element)();
  Plotly.react(element, traces, mergedLayout(layout), CONFIG);
  element.dataset.drawn = "yes";
}

const whenSeen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    whenSeen.unobserve(entry.target);
    drawChart(entry.target);
  }
}, { rootMargin: "300px" });

function addChart(grid, title, describe) {
  const plot = make("div", { class: "plot" });
  const chart = make("div", { class: "chart" }, make("h3", { text: title }), plot);
  grid.append(chart);
  charts.set(plot, describe);
  whenSeen.observe(plot);
  return plot;
}

function redrawAll() {
  for (const element of charts.keys()) if (element.dataset.drawn) drawChart(element);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => { for (const element of charts.keys()) drawChart(element); });

function lineTrace(xs, ys, name, index, runIndex = 0, more = {}) {
  const mode = xs.length > MARKED_POINTS ? "lines" : "lines+markers";
  return {
    type: "scatter", x: xs, y: ys, name: label(name), mode, connectgaps: true,
    line: { color: COLOURS[index % COLOURS.length], dash: DASHES[runIndex % DASHES.length], width: 1.8 },
    marker: { size: 4 }, ...more,
  };
}
