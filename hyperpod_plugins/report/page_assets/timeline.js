// The timeline: a row a rank on one canvas, which only ever draws the rows that are scrolled into view.

const GUTTER = 44;
const HEAD = 58;
const MARKS = [22, 38];
const GENERATIONS = [40, 54];
const PALE = ["step", "straggler_wait", "data_wait", "evaluation", "setup", "other", "none"];

function decodeRow(row, tick_s) {
  const starts = [],
    ends = [],
    keys = [];
  let at = 0;
  for (let i = 0; i < row.length; i += 2) {
    starts.push(at * tick_s);
    at += row[i + 1];
    ends.push(at * tick_s);
    keys.push(row[i]);
  }
  return { starts, ends, keys };
}

// Index of the first span that ends after `time`.
function firstSpan(row, time) {
  let low = 0,
    high = row.ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.rows = data.rows.map((row) => decodeRow(row, data.wall_s / data.ticks));
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    this.canvas.setAttribute(
      "aria-label",
      `Timeline of ${plural(this.rows.length, "rank", "ranks")} over ${seconds(data.wall_s)}. ` +
        "Keys: left and right move, plus and minus zoom, 0 shows the whole run.",
    );
    this.select = element("div", { class: "select" });
    this.inner = element("div", { class: "timeline-inner" }, this.canvas, this.select);
    this.scroller = element("div", { class: "timeline" }, this.inner);
    this.scroller.addEventListener("scroll", () => this.schedule());
    this.listen();
    view.listeners.push(() => this.schedule());
    theme.listeners.push(() => this.draw());
    new ResizeObserver(() => this.schedule()).observe(this.scroller);
  }

  get rowHeight() {
    if (theme.print) return Math.max(3, Math.min(18, Math.floor(400 / this.rows.length)));
    return this.rows.length <= 16 ? 22 : 14;
  }

  schedule() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      this.draw();
    });
  }

  x(time) {
    const [from, to] = view.range;
    return GUTTER + ((time - from) / (to - from)) * this.plotWidth;
  }

  time(x) {
    const [from, to] = view.range;
    return from + ((x - GUTTER) / this.plotWidth) * (to - from);
  }

  draw() {
    const full = HEAD + this.rows.length * this.rowHeight + 2;
    const height = theme.print ? full : Math.min(full, 520);
    this.scroller.style.height = `${height + 2}px`; // with its border
    this.inner.style.height = `${full}px`;
    const width = this.inner.clientWidth;
    if (width < GUTTER + 20) return;
    this.plotWidth = width - GUTTER - 10;
    const density = theme.print ? 2 : window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * density);
    this.canvas.height = Math.round(height * density);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(density, density);
    pen.font = "11px system-ui, sans-serif";
    this.height = height;
    this.drawRows(pen);
    this.drawHead(pen);
  }

  drawRows(pen) {
    const colours = this.data.keys.map(({ key }, i) => theme.colour(i === 0 ? "none" : key));
    const isPale = this.data.keys.map(({ key }, i) => i === 0 || PALE.includes(key));
    const labelEvery = Math.ceil(11 / this.rowHeight);
    const size = this.rowHeight;
    const top = this.scroller.scrollTop;
    pen.save();
    pen.beginPath();
    pen.rect(0, HEAD, GUTTER + this.plotWidth, this.height - HEAD);
    pen.clip();
    const last = Math.min(this.rows.length, Math.ceil((top + this.height - HEAD) / size));
    for (let n = Math.floor(top / size); n < last; n += 1) {
      const y = HEAD + n * size - top;
      // Short recoveries come second and, where they are not too many, at least a pixel wide: steps do not cover them.
      for (const pale of [true, false])
        this.drawSpans(pen, this.rows[n], colours, (key) => isPale[key] === pale, y, pale);
      if (n % labelEvery === 0) {
        pen.fillStyle = theme.colour("muted");
        pen.textAlign = "right";
        pen.textBaseline = "middle";
        pen.fillText(String(this.data.ranks[n].rank), GUTTER - 6, y + size / 2);
      }
    }
    pen.globalAlpha = this.visibleIncidents().length > 30 ? 0.2 : 0.55;
    for (const incident of this.visibleIncidents()) {
      pen.fillStyle = theme.colour(kindOf(incident));
      pen.fillRect(this.x(incident.at_ms / 1000) - 0.5, HEAD, 1, this.height - HEAD);
    }
    pen.restore();
  }

  drawSpans(pen, row, colours, isWanted, y, pale) {
    const right = GUTTER + this.plotWidth;
    const narrowest = Math.min(1, this.plotWidth / (8 * this.visibleIncidents().length + 1));
    const gap = this.rowHeight >= 8 ? 2 : this.rowHeight >= 5 ? 1 : 0;
    for (let i = firstSpan(row, view.range[0]); i < row.starts.length && row.starts[i] < view.range[1]; i += 1) {
      if (!isWanted(row.keys[i])) continue;
      const from = Math.max(GUTTER, this.x(row.starts[i]));
      // Half a pixel more, which the next span covers: no background shows through between two spans.
      const to = Math.min(right, this.x(row.ends[i]) + (pale ? 0.5 : 0));
      pen.fillStyle = colours[row.keys[i]];
      pen.fillRect(from, y + gap / 2, Math.max(to - from, pale ? 0 : narrowest), this.rowHeight - gap);
    }
  }

  visibleIncidents() {
    const [from, to] = view.range;
    return this.data.incidents.filter(({ at_ms }) => at_ms !== null && at_ms >= from * 1000 && at_ms <= to * 1000);
  }

  drawHead(pen) {
    const [from, to] = view.range;
    pen.fillStyle = theme.colour("muted");
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const step = TIME_STEPS.find((one) => ((to - from) / one) * 70 <= this.plotWidth) ?? TIME_STEPS.at(-1);
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = this.x(at);
      pen.fillRect(x, 17, 1, 4);
      pen.fillText(clock(at, step), Math.min(Math.max(x, GUTTER + 14), GUTTER + this.plotWidth - 18), 9);
    }
    pen.textAlign = "right";
    pen.fillText("rank", GUTTER - 6, HEAD - 10);
    this.drawGenerations(pen);
    this.drawMarks(pen);
  }

  // Marks that would cover each other are left out, their lines are not.
  drawMarks(pen) {
    const incidents = this.visibleIncidents();
    const radius = Math.max(2.5, Math.min(5, this.plotWidth / (2.2 * incidents.length)));
    let lastX = -Infinity;
    for (const incident of incidents) {
      const x = this.x(incident.at_ms / 1000);
      pen.fillStyle = theme.colour(kindOf(incident));
      pen.globalAlpha = incidents.length * 4 > this.plotWidth ? 0.4 : 1;
      pen.fillRect(x - 0.5, MARKS[1] - 4, 1, HEAD - MARKS[1] + 4);
      pen.globalAlpha = 1;
      if (x - lastX < 1.6 * radius) continue;
      drawMark(pen, kindOf(incident), x, MARKS[1] - 4 - 1.8 * radius, radius);
      lastX = x;
    }
  }

  // Alternating bands: which generation of the job computed when.
  drawGenerations(pen) {
    const changes = this.data.incidents.filter((one) => one.generation !== null && one.at_ms !== null);
    const starts = [
      { at: 0, name: "" },
      ...changes.map((one) => ({ at: one.at_ms / 1000, name: String(one.generation) })),
    ];
    if (!changes.length) return;
    const [top, bottom] = GENERATIONS;
    starts.forEach(({ at, name }, n) => {
      const end = n + 1 < starts.length ? starts[n + 1].at : view.full[1];
      const x0 = Math.max(GUTTER, this.x(at));
      const x1 = Math.min(GUTTER + this.plotWidth, this.x(end));
      if (x1 <= x0) return;
      pen.fillStyle = theme.colour(n % 2 ? "band-odd" : "band-even");
      pen.fillRect(x0, top, x1 - x0, bottom - top);
      const text = [`generation ${name}`, name].find((one) => name && pen.measureText(one).width < x1 - x0 - 6);
      if (!text) return;
      pen.fillStyle = theme.colour("text");
      pen.textAlign = "center";
      pen.fillText(text, (x0 + x1) / 2, (top + bottom) / 2 + 0.5);
    });
  }

  listen() {
    const canvas = this.canvas;
    let start = null;
    const position = (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.min(Math.max(event.clientX - box.left, GUTTER), GUTTER + (this.plotWidth ?? 0));
      return [x, event.clientY - box.top];
    };
    const stop = () => {
      start = null;
      this.select.style.display = "none";
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = position(event)[0];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = position(event);
      if (start === null) return this.hover(event, x, y);
      tooltip.hide();
      this.select.style.display = "block";
      this.select.style.left = `${Math.min(start, x)}px`;
      this.select.style.width = `${Math.abs(x - start)}px`;
    });
    canvas.addEventListener("pointerup", (event) => {
      const x = position(event)[0];
      if (start !== null && Math.abs(x - start) > 4)
        view.set(this.time(Math.min(start, x)), this.time(Math.max(start, x)));
      stop();
    });
    canvas.addEventListener("pointercancel", stop);
    canvas.addEventListener("pointerleave", () => tooltip.hide());
    canvas.addEventListener("dblclick", () => view.reset());
    canvas.addEventListener("keydown", (event) => {
      const actions = {
        ArrowLeft: () => view.move(-0.2),
        ArrowRight: () => view.move(0.2),
        "+": () => view.scale(0.5),
        "=": () => view.scale(0.5),
        "-": () => view.scale(2),
        0: () => view.reset(),
      };
      if (!Object.hasOwn(actions, event.key) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    });
  }

  hover(event, x, y) {
    const lines = [];
    const near = this.visibleIncidents()
      .map((incident) => ({ incident, distance: Math.abs(this.x(incident.at_ms / 1000) - x) }))
      .sort((a, b) => a.distance - b.distance)[0];
    const number = Math.floor((y - HEAD + this.scroller.scrollTop) / this.rowHeight);
    if (y >= HEAD && number < this.rows.length) lines.push(...this.spanLines(number, this.time(x)));
    if (near && near.distance < (y < HEAD ? 8 : 4)) lines.push(...incidentLines(near.incident));
    if (lines.length) tooltip.show(event.clientX, event.clientY, lines);
    else tooltip.hide();
  }

  spanLines(number, time) {
    const row = this.rows[number];
    const i = firstSpan(row, time);
    const title = `Rank ${this.data.ranks[number].rank} at ${clock(time)}`;
    if (i >= row.starts.length || row.starts[i] > time) return [title, "No process"];
    const length = seconds(row.ends[i] - row.starts[i]);
    return [
      title,
      `${this.data.keys[row.keys[i]].label}, ${length}`,
      `from ${clock(row.starts[i])} to ${clock(row.ends[i])}`,
    ];
  }
}

function incidentLines(incident) {
  const where = incident.rank === null ? "" : `, rank ${incident.rank}`;
  return [
    `#${incident.number} ${INCIDENT_KINDS[kindOf(incident)]}${where}`,
    incident.cause,
    `took ${seconds(incident.total_s)}`,
  ];
}

// A triangle for a failure, a diamond for a change of size, a square for a restart: told apart without colour, too.
function drawMark(pen, kind, x, y, r) {
  const corners = {
    failure: [
      [-r, 0],
      [r, 0],
      [0, 2 * r],
    ],
    resize: [
      [0, 0],
      [r, r],
      [0, 2 * r],
      [-r, r],
    ],
    restart: [
      [-r + 1, 1],
      [r - 1, 1],
      [r - 1, 2 * r - 1],
      [-r + 1, 2 * r - 1],
    ],
  }[kind];
  pen.beginPath();
  corners.forEach(([dx, dy], n) => (n ? pen.lineTo(x + dx, y + dy) : pen.moveTo(x + dx, y + dy)));
  pen.closePath();
  pen.fill();
}
