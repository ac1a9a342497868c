// What all charts share: the colours of the theme, the part of the run that is shown, and the box beside the pointer.

const theme = {
  listeners: [],
  print: false,
  set(name) {
    document.documentElement.dataset.theme = name;
    this.listeners.forEach((listener) => listener());
  },
  get name() {
    return document.documentElement.dataset.theme;
  },
  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },
};

const view = {
  full: [0, 1],
  range: [0, 1],
  listeners: [],
  set(from, to) {
    const [first, last] = this.full;
    const width = Math.min(Math.max(to - from, (last - first) / 20000), last - first);
    const start = Math.min(Math.max(from, first), last - width);
    this.range = [start, start + width];
    this.listeners.forEach((listener) => listener());
  },
  reset() {
    this.set(...this.full);
  },
  get isFull() {
    return this.range[0] === this.full[0] && this.range[1] === this.full[1];
  },
  move(part) {
    const [from, to] = this.range;
    this.set(from + part * (to - from), to + part * (to - from));
  },
  scale(factor) {
    const [from, to] = this.range;
    const middle = (from + to) / 2;
    this.set(middle - (factor * (to - from)) / 2, middle + (factor * (to - from)) / 2);
  },
};

// Distances between marks of a time axis, in seconds.
const TIME_STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10800, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000,
];

const tooltip = {
  node: element("div", { class: "tooltip", role: "status" }),
  show(x, y, lines) {
    this.node.replaceChildren(...lines.map((line) => element("div", {}, line)));
    this.node.style.display = "block";
    const { width, height } = this.node.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - 8;
    this.node.style.left = `${Math.max(8, Math.min(x + 14, right))}px`;
    this.node.style.top = `${y + 18 + height > window.innerHeight ? y - height - 12 : y + 18}px`;
  },
  hide() {
    this.node.style.display = "none";
  },
};

const INCIDENT_KINDS = { failure: "Failure", resize: "Change of size", restart: "Restart of all processes" };
const kindOf = (incident) => (Object.hasOwn(INCIDENT_KINDS, incident.kind) ? incident.kind : "failure");
