// Numbers as text, and elements of the page. Texts from ledgers only ever become text nodes and attributes.

const UNKNOWN = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function seconds(value) {
  if (!isNumber(value)) return UNKNOWN;
  if (value < 0) return "−" + seconds(-value);
  if (value === 0) return "0 s";
  if (value < 0.001) return "< 0.001 s";
  if (value < 0.095) return `${Number(value.toPrecision(2))} s`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  const pair = (whole, unit, part, small) =>
    part ? `${count(whole)} ${unit} ${part} ${small}` : `${count(whole)} ${unit}`;
  const whole = Math.round(value);
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(value / 60);
  if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(value / 3600);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

// For the marks of an axis: without digits that say nothing.
const secondsMark = (value) => (value < 59.95 ? `${Number(value.toPrecision(3))} s` : seconds(value));
const percentMark = (share) => `${Number((100 * share).toPrecision(3))} %`;

const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(1)} %` : UNKNOWN);
const count = (value) => (isNumber(value) ? value.toLocaleString("en-US") : UNKNOWN);
const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
const decimal = (value) => (isNumber(value) ? value.toLocaleString("en-US", { maximumSignificantDigits: 5 }) : UNKNOWN);

function short(value) {
  if (!isNumber(value)) return UNKNOWN;
  const units = [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ];
  const [size, unit] = units.find(([limit]) => Math.abs(value) >= limit) ?? [1, ""];
  return `${Number((value / size).toPrecision(4))}${unit}`;
}

// Time since the run began as on a clock, as exact as `step_s` between two marks needs.
function clock(value, step_s = 1) {
  const digits = step_s >= 1 ? 0 : Math.min(3, Math.ceil(-Math.log10(step_s)));
  const total = Number(value.toFixed(digits));
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  const rest = total % 60;
  const end = digits ? rest.toFixed(digits).padStart(digits + 3, "0") : two(rest);
  return `${Math.floor(total / 3600)}:${two((total / 60) % 60)}:${end}`;
}

function utc(milliseconds) {
  const date = new Date(milliseconds);
  if (milliseconds === null || Number.isNaN(date.getTime())) return "unknown time";
  return `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const swatch = (key) => {
  const mark = element("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = `var(--${key})`;
  return mark;
};
