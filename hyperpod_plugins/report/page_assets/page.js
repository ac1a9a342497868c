// The sections of the page, in their order.

const errors = [];
addEventListener("error", (event) => {
  errors.push(event.message);
  document.documentElement.dataset.errors = errors.join("\n");
});

function section(id, title, note, ...content) {
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, title),
    note ? element("p", { class: "note" }, note) : null,
    ...content,
  );
}

function heading(data) {
  const button = element("button", { type: "button", class: "toggle" });
  const name = () => {
    button.textContent = theme.name === "dark" ? "Light colours" : "Dark colours";
  };
  button.addEventListener("click", () => theme.set(theme.name === "dark" ? "light" : "dark"));
  theme.listeners.push(name);
  name();
  const state = data.is_complete
    ? element("span", { class: "state" }, "complete")
    : element("span", { class: "state cut" }, "cut off");
  const facts = [
    `began ${utc(data.began_at_ms)}`,
    plural(data.num_ranks, "rank", "ranks"),
    plural(data.hosts, "host", "hosts"),
    ...(data.verdict.action === "continue" && data.verdict.why ? [data.verdict.why] : []),
  ];
  return [
    element(
      "div",
      {},
      element("h1", {}, element("bdi", {}, `Run ${data.run_id}`), " ", state),
      element("p", { class: "note" }, facts.join(" · ")),
    ),
    button,
  ];
}

function interval(estimate, missing) {
  if (!estimate) return [UNKNOWN, missing];
  if (!isNumber(estimate.high)) return [`> ${seconds(estimate.low)}`, "95 % confidence; nothing has failed"];
  return [seconds(estimate.value), `95 %: ${seconds(estimate.low)} to ${seconds(estimate.high)}`];
}

function tiles(data) {
  const head = data.headline;
  const cost = head.failures_cost_s,
    other = head.checkpoint_restart_cost_s;
  const times = isNumber(other) && cost > 0 ? `${Number((other / cost).toPrecision(2))} times as much. ` : "";
  const list = [
    ["Goodput", percent(head.goodput), "of all ranks’ time in steps that counted"],
    ["ETTR", percent(head.ettr), "of the time after set-up not lost to failures and changes of size"],
    ["Failures", count(head.num_failures), `${plural(head.num_repairs, "repair", "repairs")} within living processes`],
    ["Lost to failures", seconds(cost), `per rank, ${percent(isNumber(cost) ? cost / data.wall_s : null)} of the run`],
    [
      "With checkpoint-restart",
      seconds(other),
      isNumber(other) ? times + head.checkpoint_restart_assumes : "no estimate can be made",
    ],
    [
      "Resizes / restarts",
      `${count(head.num_resizes)} / ${count(head.num_restarts)}`,
      "changes of size / restarts of all processes",
    ],
    ["MTBF", ...interval(head.mtbf_s, "mean time between failures")],
    ["MTTR", ...interval(head.mttr_s, "mean time to repair: no repairs")],
    ["Wall time", seconds(head.wall_s), "first process to last line"],
    [
      "Steps",
      count(head.steps_committed),
      `${count(head.steps_lost)} run again` +
        (isNumber(head.ideal_step_s) ? `; ${seconds(head.ideal_step_s)} each without outliers` : ""),
    ],
  ];
  return element(
    "dl",
    { class: "tiles" },
    ...list.map(([name, value, note]) =>
      element(
        "div",
        {},
        element("dt", {}, name),
        element("dd", { class: "value" }, value),
        element("dd", { class: "note" }, note),
      ),
    ),
  );
}

function notices(data) {
  const list = [];
  if (!data.is_complete)
    list.push([
      "",
      "The run was cut off: not all ranks ended as their program wanted. The figures reach until the last line of a ledger.",
    ]);
  if (data.problems.length) {
    const more = data.num_problems - data.problems.length;
    const lines = [...data.problems, ...(more > 0 ? [`and ${count(more)} more`] : [])];
    list.push(["", "Some files are incomplete or damaged; the figures leave out what could not be read:", ...lines]);
  }
  const { action, why } = data.verdict;
  if (action === "stop") list.push(["stop", "Do not start this run again as it is.", why]);
  if (action === "restart") list.push(["", "To go on, start this run again.", why]);
  return list.map(([kind, first, ...lines]) =>
    element(
      "div",
      { class: `notice ${kind}`, role: "note" },
      element("p", {}, first),
      lines.length ? element("ul", {}, ...lines.map((line) => element("li", {}, line))) : null,
    ),
  );
}

function timelineSection(data) {
  if (!data.rows.some((row) => row.length))
    return section("timeline", "Timeline", "No ledger says what the ranks did.");
  const timeline = new Timeline(data);
  const reset = element("button", { type: "button" }, "Whole run");
  const shown = element("span", { class: "note", "aria-live": "polite" });
  const update = () => {
    reset.disabled = view.isFull;
    shown.textContent = view.isFull
      ? "Drag to zoom, here or in a curve below: all show the same time."
      : `${clock(view.range[0])} to ${clock(view.range[1])}`;
  };
  reset.addEventListener("click", () => view.reset());
  view.listeners.push(update);
  update();
  const used = new Set(data.rows.flatMap((row) => row.filter((_, n) => n % 2 === 0)));
  const entries = data.keys
    .map((one, n) => ({ ...one, n }))
    .filter(({ n }) => used.has(n))
    .map(({ key, label, n }) => element("li", {}, swatch(n === 0 ? "none" : key), label));
  const kinds = new Set(data.incidents.map(kindOf));
  const marks = Object.entries(INCIDENT_KINDS)
    .filter(([kind]) => kinds.has(kind))
    .map(([kind, name]) => element("li", {}, element("span", { class: `mark ${kind}`, "aria-hidden": "true" }), name));
  return section(
    "timeline",
    "Timeline",
    "Time since the start of the run as h:mm:ss.",
    element("div", { class: "controls" }, reset, shown),
    timeline.scroller,
    element("ul", { class: "legend" }, ...entries, ...marks),
  );
}

function stagesSection(data) {
  const all = data.incidents.filter((one) => STAGES.some(([field]) => one[field] > 0));
  if (!all.length) return section("recoveries", "Recoveries", "Nothing had to be recovered.");
  const incidents = all.slice(-100);
  const totals = incidents.map((one) => one.total_s ?? 0).sort((a, b) => a - b);
  const longest = incidents.reduce((a, b) => ((b.total_s ?? 0) > (a.total_s ?? 0) ? b : a));
  const note =
    `Half took at most ${seconds(totals[(totals.length - 1) >> 1])}; the longest, #${longest.number}, ${seconds(longest.total_s)}.` +
    (all.length > incidents.length ? ` The last ${incidents.length} of ${count(data.num_incidents)} are shown.` : "");
  const place = element("div", {}, stagesChart(incidents, false));
  const button = element("button", { type: "button", "aria-pressed": "false" }, "As shares");
  button.addEventListener("click", () => {
    const asShares = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(asShares));
    charts.splice(
      charts.findIndex((chart) => place.contains(chart.node)),
      1,
    );
    place.replaceChildren(stagesChart(incidents, asShares));
  });
  return section("recoveries", "Recoveries", note, element("div", { class: "controls" }, button), place);
}

function categoriesSection(data) {
  const parts = data.categories
    .map((one) => ({ ...one, ...data.keys[one.key], order: one.key }))
    .filter(({ seconds: time }) => time > 0)
    .sort((a, b) => a.order - b.order);
  if (!parts.length) return section("categories", "Where the time went", "No ledger says where the time went.");
  const columns = [
    { name: "Category", value: (one) => one.label, text: (one) => element("span", {}, swatch(one.key), one.label) },
    { name: "Share", numeric: true, value: (one) => one.share, text: (one) => percent(one.share) },
    {
      name: "Per rank",
      numeric: true,
      value: (one) => one.seconds,
      text: (one) => seconds(one.seconds / Math.max(1, data.num_ranks)),
    },
    { name: "All ranks", numeric: true, value: (one) => one.seconds, text: (one) => seconds(one.seconds) },
  ];
  const largest = [...parts].sort((a, b) => b.seconds - a.seconds);
  return section(
    "categories",
    "Where the time went",
    null,
    stackedBar(parts, parts.map((one) => `${one.label} ${percent(one.share)}`).join(", "), "bar"),
    table("Time by category", columns, largest),
  );
}

function curvesSection(data) {
  const steps = data.steps;
  if (!steps.at_ms.length) return section("curves", "Steps", "No step was committed.");
  const has = (values) => values.some(isNumber);
  const fromZero = (_, __, max) => [0, max * 1.05 || 1];
  const curves = [
    ["Loss", { values: steps.loss, text: decimal }],
    ["Duration of a step", { values: steps.duration_s, text: seconds, mark: secondsMark }, fromZero],
    ["World size", { values: steps.world_size, text: short, stepped: true }, fromZero],
    ["Global batch", { values: steps.global_batch, text: short, stepped: true }, fromZero],
    ["Samples so far", { values: steps.samples, text: short }, fromZero],
    ["Goodput of the last steps", { values: steps.goodput, text: percent, mark: percentMark }, () => [0, 1]],
  ];
  const figures = curves
    .filter(([, { values }]) => has(values))
    .map(([title, series, range]) =>
      element("figure", {}, element("figcaption", {}, title), timeChart(title, data, series, range)),
    );
  const missing = has(steps.loss) ? "" : "No loss was recorded. ";
  const note =
    data.num_steps > steps.at_ms.length
      ? `${count(data.num_steps)} points; of each group of neighbours the first one and the extremes of loss and duration are drawn.`
      : "";
  const lines = data.incidents.length ? "Vertical lines are incidents. " : "";
  return section("curves", "Steps", `${lines}${missing}${note}`, element("div", { class: "figures" }, ...figures));
}

function nodesSection(data) {
  const content = [];
  if (data.stragglers.length) {
    content.push(
      element("h3", {}, "Stragglers"),
      table(
        "Stragglers",
        [
          { name: "Rank", numeric: true, value: (one) => one.rank },
          { name: "Host", value: (one) => one.host },
          { name: "Slow in", value: (one) => one.phase },
          {
            name: "Held the job back",
            numeric: true,
            value: (one) => one.held_back_s,
            text: (one) => seconds(one.held_back_s),
          },
          {
            name: "Steps as the slowest",
            numeric: true,
            value: (one) => one.num_steps,
            text: (one) => count(one.num_steps),
          },
          {
            name: "Run without it",
            numeric: true,
            value: (one) => one.without_it_s,
            text: (one) => seconds(one.without_it_s),
          },
        ],
        data.stragglers,
      ),
    );
  }
  if (data.failing_nodes.length) {
    content.push(
      element("h3", {}, "Failing nodes"),
      table(
        "Failing nodes",
        [
          { name: "Host", value: (one) => one.host },
          { name: "Failures", numeric: true, value: (one) => one.num_failures, text: (one) => count(one.num_failures) },
          {
            name: "Probability by chance",
            numeric: true,
            value: (one) => one.probability,
            text: (one) => (isNumber(one.probability) ? String(Number(one.probability.toPrecision(2))) : UNKNOWN),
          },
        ],
        data.failing_nodes,
      ),
    );
  }
  const missing = [
    data.stragglers.length
      ? ""
      : data.are_waits_measured
        ? "No rank held the others back."
        : "Waits were not measured: which rank held the others back is unknown.",
    data.failing_nodes.length ? "" : "No node failed more often than chance explains.",
  ];
  return section("nodes", "Stragglers and failing nodes", missing.filter(Boolean).join(" "), ...content);
}

// Shows the incident and what followed in the timeline and the curves.
function showButton(incident, data) {
  if (incident.at_ms === null) return String(incident.number);
  const button = element(
    "button",
    { type: "button", class: "show", "aria-label": `Show incident ${incident.number} in the timeline` },
    String(incident.number),
  );
  button.addEventListener("click", () => {
    const length = Math.max(incident.total_s ?? 0, data.wall_s / 500);
    view.set(incident.at_ms / 1000 - length, incident.at_ms / 1000 + 2 * length);
    document.getElementById("timeline").scrollIntoView({ block: "nearest" });
  });
  return button;
}

function incidentsSection(data) {
  if (!data.incidents.length) return section("incidents", "Incidents", "There were none.");
  const time = (name, field) => ({
    name,
    numeric: true,
    value: (one) => one[field],
    text: (one) => seconds(one[field]),
  });
  const whole = (name, field) => ({
    name,
    numeric: true,
    value: (one) => one[field],
    text: (one) => count(one[field]),
  });
  const columns = [
    { name: "#", numeric: true, value: (one) => one.number, text: (one) => showButton(one, data) },
    {
      name: "At",
      numeric: true,
      value: (one) => one.at_ms,
      text: (one) => (one.at_ms === null ? UNKNOWN : clock(one.at_ms / 1000)),
    },
    {
      name: "Kind",
      value: (one) => one.kind,
      text: (one) =>
        element("span", {}, element("span", { class: `mark ${kindOf(one)}`, "aria-hidden": "true" }), one.kind),
    },
    { name: "Cause", wide: true, value: (one) => one.cause },
    whole("Rank", "rank"),
    { name: "Host", value: (one) => one.host },
    time("Total", "total_s"),
    ...STAGES.map(([field, name]) => time(name, field)),
    { name: "Repair", value: (one) => one.level },
    whole("Step", "step"),
    whole("Steps lost", "steps_lost"),
    whole("Generation", "generation"),
  ];
  const left = data.num_incidents - data.incidents.length;
  return section(
    "incidents",
    "Incidents",
    `${left > 0 ? `The ${count(data.incidents.length)} costliest of ${count(data.num_incidents)}. ` : ""}A number shows its incident in the timeline.`,
    table("Incidents", columns, data.incidents, { filter: true }),
  );
}

function ranksSection(data) {
  if (!data.ranks.length) return section("ranks", "Ranks", "No ledger of a rank was found.");
  const index = (key) => data.keys.findIndex((one) => one.key === key);
  const lost = ["detect", "assemble", "restore", "redone"].map(index);
  const share = (one, numbers) =>
    one.wall_s > 0 ? numbers.reduce((sum, n) => sum + (one.seconds[n] ?? 0), 0) / one.wall_s : null;
  const parts = (one) =>
    data.keys.map(({ key, label }, n) => ({ key: n ? key : "none", label, share: share(one, [n]) }));
  const columns = [
    { name: "Rank", numeric: true, value: (one) => one.rank },
    { name: "Host", value: (one) => one.hosts.join(", ") },
    { name: "Wall time", numeric: true, value: (one) => one.wall_s, text: (one) => seconds(one.wall_s) },
    {
      name: "In steps",
      numeric: true,
      value: (one) => share(one, [index("step")]),
      text: (one) => percent(share(one, [index("step")])),
    },
    {
      name: "Lost to failures",
      numeric: true,
      value: (one) => share(one, lost),
      text: (one) => percent(share(one, lost)),
    },
    {
      name: "Waited in collectives",
      numeric: true,
      value: (one) => one.waited_s,
      text: (one) => seconds(one.waited_s),
    },
    { name: "Processes", numeric: true, value: (one) => one.num_processes, text: (one) => count(one.num_processes) },
    { name: "Endings", value: (one) => one.endings.join(", ") },
    {
      name: "Time",
      value: (one) => share(one, [index("step")]),
      text: (one) => stackedBar(parts(one), `Time of rank ${one.rank} by category`, "bar small"),
    },
  ];
  return section("ranks", "Ranks", null, table("Ranks", columns, data.ranks, { filter: true }));
}

function followTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme.set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme.set(dark.matches ? "dark" : "light"));
  let before = "light";
  const redraw = () => charts.forEach((chart) => chart.draw());
  theme.listeners.push(redraw);
  addEventListener("beforeprint", () => {
    before = theme.name;
    theme.print = true;
    document.documentElement.dataset.print = "true";
    theme.set("light");
  });
  addEventListener("afterprint", () => {
    theme.print = false;
    delete document.documentElement.dataset.print;
    theme.set(before);
  });
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  view.full = view.range = [0, data.wall_s];
  followTheme();
  document.getElementById("top").append(...heading(data));
  document
    .getElementById("report")
    .append(
      tiles(data),
      ...notices(data),
      timelineSection(data),
      stagesSection(data),
      categoriesSection(data),
      curvesSection(data),
      nodesSection(data),
      incidentsSection(data),
      ranksSection(data),
    );
  document.getElementById("end").append("Made by hyperpod report. Charts: uPlot 1.6.32, MIT licence.");
  document.body.append(tooltip.node);
  theme.set(theme.name);
  requestAnimationFrame(() => {
    document.documentElement.dataset.ready = "true";
  });
}

main();
