// Curves over the run and the stages of recoveries, drawn by uPlot.

const charts = [];

const axis = (more) => ({
  stroke: () => theme.colour("muted"),
  grid: { stroke: () => theme.colour("line"), width: 1 },
  ticks: { stroke: () => theme.colour("line"), width: 1, size: 4 },
  font: "11px system-ui, sans-serif",
  ...more,
});

// uPlot fixes sizes and the colours of its legend when it is made, so a chart is made again for another theme or width.
class Chart {
  constructor(label, height, options) {
    this.node = element("div", { class: "chart", role: "img", "aria-label": label });
    this.options = options;
    this.height = height;
    this.width = 0;
    charts.push(this);
    new ResizeObserver(() => {
      if (this.node.clientWidth !== this.width) this.draw();
    }).observe(this.node);
  }

  draw() {
    this.width = this.node.clientWidth;
    if (this.width < 60) return;
    this.plot?.destroy();
    const { data, ...options } = this.options(this.width);
    this.plot = new uPlot({ width: this.width, height: this.height, ...options }, data, this.node);
  }
}

// A chart of { values, text, mark, stepped } over the time of the run; `mark` makes the texts of the axis.
function timeChart(title, data, { values, text, mark, stepped }, range) {
  const times = data.steps.at_ms.map((at) => at / 1000);
  const showView = (plot) => plot.setScale("x", { min: view.range[0], max: view.range[1] });
  const known = values.filter(isNumber);
  const chart = new Chart(`${title} over time: first ${text(known[0])}, last ${text(known.at(-1))}`, 170, () => ({
    data: [times, values],
    padding: [8, 24, 0, 0],
    scales: { x: { time: false }, y: { range } },
    axes: [
      axis({
        size: 28,
        incrs: TIME_STEPS,
        space: 70,
        values: (_, at, __, ___, step) => at.map((one) => clock(one, step)),
      }),
      axis({ size: 54, space: 32, values: (_, at) => at.map(mark ?? text) }),
    ],
    series: [
      {
        label: "Step",
        value: (_, __, ___, i) => (isNumber(i) ? `${count(data.steps.step[i])} at ${clock(times[i])}` : UNKNOWN),
      },
      {
        label: "Value",
        stroke: theme.colour("curve"),
        width: 1.5,
        points: { show: known.length < 3 },
        paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        value: (_, value) => text(value),
      },
    ],
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false },
      sync: { key: "run" },
      bind: { dblclick: () => () => view.reset() },
    },
    hooks: { ready: [showView], drawClear: [(plot) => drawIncidents(plot, data)], setSelect: [zoomTo] },
  }));
  view.listeners.push(() => chart.plot && showView(chart.plot));
  return chart.node;
}

function zoomTo(plot) {
  const { left, width } = plot.select;
  if (width < 5) return;
  const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  view.set(from, to);
}

function drawIncidents(plot, data) {
  const { ctx: pen, bbox } = plot;
  pen.save();
  pen.globalAlpha = Math.min(0.8, plot.width / (12 * data.incidents.length + 1));
  for (const incident of data.incidents) {
    if (incident.at_ms === null) continue;
    const x = plot.valToPos(incident.at_ms / 1000, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    pen.fillStyle = theme.colour(kindOf(incident));
    pen.fillRect(Math.round(x), bbox.top, Math.max(1, devicePixelRatio), bbox.height);
  }
  pen.restore();
}

const STAGES = [
  ["detect_s", "Detect", "detect"],
  ["assemble_s", "Assemble", "assemble"],
  ["restore_s", "Restore", "restore"],
  ["redone_s", "Redone", "redone"],
];

// Stacked bars, one for each incident: seconds, or the share of each stage.
function stagesChart(incidents, asShares) {
  const parts = STAGES.map(([field]) => incidents.map((one) => Math.max(0, one[field] ?? 0)));
  const totals = incidents.map((_, n) => parts.reduce((sum, part) => sum + part[n], 0));
  const shown = parts.map((part) => part.map((value, n) => (asShares ? value / (totals[n] || 1) : value)));
  const stacked = shown.map((_, stage) =>
    incidents.map((__, n) => shown.slice(0, stage + 1).reduce((sum, part) => sum + part[n], 0)),
  );
  const mark = asShares ? percentMark : secondsMark;
  const names = incidents.map((one) => one.number);
  // The tallest bar is drawn first; shorter ones cover its lower part.
  const order = STAGES.map((_, n) => n).reverse();
  const chart = new Chart("Seconds of each stage of each recovery", 220, () => ({
    data: [incidents.map((_, n) => n + 1), ...order.map((n) => stacked[n])],
    padding: [8, 20, 0, 0],
    scales: {
      x: { time: false, range: () => [0.4, incidents.length + 0.6] },
      y: { range: (_, __, max) => [0, asShares ? 1 : max * 1.05 || 1] },
    },
    axes: [
      axis({
        size: 28,
        grid: { show: false },
        incrs: [1, 2, 5, 10, 20, 50, 100],
        space: 34,
        values: (_, at) => at.map((n) => (names[n - 1] ? `#${names[n - 1]}` : "")),
      }),
      axis({ size: 66, space: 32, values: (_, at) => at.map(mark) }),
    ],
    series: [
      { label: "Incident", value: (_, __, ___, i) => (isNumber(i) ? `#${names[i]}` : UNKNOWN) },
      ...order.map((n) => ({
        label: STAGES[n][1],
        stroke: theme.colour(STAGES[n][2]),
        fill: theme.colour(STAGES[n][2]),
        width: 0,
        points: { show: false },
        paths: uPlot.paths.bars({ size: [0.72, 44] }),
        value: (_, __, ___, i) => (isNumber(i) ? seconds(parts[n][i]) : UNKNOWN),
      })),
    ],
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
  }));
  return chart.node;
}
