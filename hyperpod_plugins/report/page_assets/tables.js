// Tables that can be sorted and filtered.

// Columns are { name, value(row), text(row), numeric, title, wide }; `value` is what rows are sorted by.
function table(label, columns, rows, { isSortable = true, filter = false } = {}) {
  const body = element("tbody");
  const lines = rows.map((row) => {
    const texts = columns.map((column) => (column.text ? column.text(row) : String(column.value(row) ?? UNKNOWN)));
    const cells = columns.map((column, n) => {
      const attributes = { class: [column.numeric ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() };
      return n === 0 ? element("th", { scope: "row", ...attributes }, texts[n]) : element("td", attributes, texts[n]);
    });
    return {
      row,
      node: element("tr", {}, ...cells),
      words: texts
        .map((one) => one.textContent ?? one)
        .join(" ")
        .toLowerCase(),
    };
  });
  const heads = columns.map((column) => element("th", { scope: "col", class: column.numeric ? "number" : "" }));
  const sort = (n, isDescending) => {
    const key = columns[n].value;
    lines.sort((a, b) => compare(key(a.row), key(b.row), isDescending));
    heads.forEach((head, i) =>
      i === n
        ? head.setAttribute("aria-sort", isDescending ? "descending" : "ascending")
        : head.removeAttribute("aria-sort"),
    );
    body.append(...lines.map(({ node }) => node));
  };
  columns.forEach((column, n) => {
    if (!isSortable) return heads[n].append(column.name);
    const button = element("button", { type: "button" }, column.name);
    button.addEventListener("click", () => {
      const now = heads[n].getAttribute("aria-sort");
      sort(n, now === null ? Boolean(column.numeric) && n > 0 : now === "ascending");
    });
    heads[n].append(button);
  });
  body.append(...lines.map(({ node }) => node));
  const whole = element(
    "table",
    {},
    element("caption", { class: "hidden" }, label),
    element("thead", {}, element("tr", {}, ...heads)),
    body,
  );
  const scroller = element("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": label }, whole);
  return filter ? element("div", {}, filterField(label, lines), scroller) : scroller;
}

// Unknown values come last in either direction.
function compare(a, b, isDescending) {
  const isMissing = (value) => value === null || value === undefined || value === "";
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return isDescending ? -order : order;
}

function filterField(label, lines) {
  const input = element("input", { type: "search", placeholder: "Filter", "aria-label": `${label}: filter by text` });
  const result = element("span", { class: "note", "aria-live": "polite" });
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const { node, words: text } of lines) {
      node.hidden = !words.every((word) => text.includes(word));
      shown += !node.hidden;
    }
    result.textContent = input.value ? `${count(shown)} of ${count(lines.length)}` : "";
  });
  return element("div", { class: "controls" }, input, result);
}

// A bar whose parts are { key, label, share }.
function stackedBar(parts, label, className) {
  const bar = element("div", { class: className, role: "img", "aria-label": label });
  for (const { key, label: name, share } of parts) {
    if (!(share > 0)) continue;
    const piece = element("span", { title: `${name}: ${percent(share)}` });
    piece.style.flexGrow = String(share);
    piece.style.background = `var(--${key})`;
    bar.append(piece);
  }
  return bar;
}
