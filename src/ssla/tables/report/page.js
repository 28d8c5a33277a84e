"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const R = D.rows, isClass = D.kind === "class", isCount = D.kind === "count";
  const state = { row: D.doubtful[0], factor: D.own, sort: "id", down: false, query: "", page: 0 };
  const PAGE = 25;
  const el = (id) => document.getElementById(id);
  const esc = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const num = (v, digits = 4) => {
    if (v === null || v === undefined) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    const text = size >= 1e6 || size < 1e-4 ? v.toExponential(digits - 2) : String(Number(v.toPrecision(digits)));
    return text.replace("-", "−");
  };
  const pct = (v, digits = 1) => (v === null ? "–" : (100 * v).toFixed(digits) + "%");

  // --- pictures ---------------------------------------------------------------------------
  function ticks(low, high, count = 5) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
    return found;
  }

  // draw(x, y) gives the marks, with functions from data to the picture
  function chart({ x, y, xLabel, yLabel, label, draw, width = 380, height = 260, left = 52, yTicks = true, legend = [] }) {
    const top = legend.length ? 30 : 10, right = 14, bottom = 42;
    const px = (v) => +(left + ((v - x[0]) / (x[1] - x[0])) * (width - left - right)).toFixed(2);
    const py = (v) => +(height - bottom - ((v - y[0]) / (y[1] - y[0])) * (height - bottom - top)).toFixed(2);
    let out = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${esc(label)}">`;
    for (const t of ticks(...x)) {
      out += `<line x1="${px(t)}" x2="${px(t)}" y1="${top}" y2="${height - bottom}" stroke="var(--line)" stroke-width=".6"/>`;
      out += `<text class="soft" x="${px(t)}" y="${height - bottom + 16}" text-anchor="middle">${num(t)}</text>`;
    }
    if (yTicks) for (const t of ticks(...y)) {
      out += `<line x1="${left}" x2="${width - right}" y1="${py(t)}" y2="${py(t)}" stroke="var(--line)" stroke-width=".6"/>`;
      out += `<text class="soft" x="${left - 6}" y="${py(t) + 4}" text-anchor="end">${num(t)}</text>`;
    }
    out += draw(px, py);
    out += `<line x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}" stroke="var(--soft)"/>`;
    out += `<text x="${(left + width - right) / 2}" y="${height - 6}" text-anchor="middle">${esc(xLabel)}</text>`;
    if (yLabel) out += `<text transform="translate(13 ${(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">${esc(yLabel)}</text>`;
    let at = left;
    for (const [mark, text] of legend) {
      out += `<g transform="translate(${at} 14)">${mark}<text x="22" y="4">${esc(text)}</text></g>`;
      at += 32 + 6.6 * text.length;
    }
    return out + "</svg>";
  }
  const path = (points, color, more = "") => `<path d="M${points.map((p) => p.join(" ")).join("L")}" fill="none" stroke="${color}" stroke-width="2" ${more}/>`;
  const area = (points, color) => `<path d="M${points.map((p) => p.join(" ")).join("L")}Z" fill="${color}"/>`;
  const lineMark = (color, more = "") => `<line x1="0" x2="18" y1="0" y2="0" stroke="${color}" stroke-width="2.5" ${more}/>`;
  const boxMark = (color) => `<rect x="0" y="-6" width="18" height="11" fill="${color}"/>`;
  const DASH = 'stroke-dasharray="5 4"';

  function calibration() {
    const c = D.calibration;
    el("curve").innerHTML = chart({
      x: [0, 1], y: [0, 1], xLabel: "level of the interval", yLabel: "share of y inside",
      label: `Coverage by level: ${c.level.map((l, i) => (i % 3 ? "" : `${pct(l, 0)}: ${pct(c.inside[i])}`)).filter(Boolean).join(", ")}`,
      legend: [[lineMark("var(--main)"), "predictive"], [lineMark("var(--other)", DASH), "plug-in"], [boxMark("var(--tint)"), "calibrated"]],
      draw: (x, y) => area([...c.level.map((l, i) => [x(l), y(c.low[i])]), ...c.level.map((l, i) => [x(l), y(c.high[i])]).reverse()], "var(--tint)")
        + `<line x1="${x(0)}" y1="${y(0)}" x2="${x(1)}" y2="${y(1)}" stroke="var(--soft)"/>`
        + path(c.level.map((l, i) => [x(l), y(c.plugIn[i])]), "var(--other)", DASH) + path(c.level.map((l, i) => [x(l), y(c.inside[i])]), "var(--main)"),
    });
    const p = D.pit, n = p.heights.length, high = 1.1 * Math.max(p.high, ...p.heights, ...p.plugIn);
    const steps = (x, y, v) => v.flatMap((h, i) => [[x(i / n), y(h)], [x((i + 1) / n), y(h)]]);
    el("pit").innerHTML = chart({
      x: [0, 1], y: [0, high], xLabel: "P(Y ≤ y)", yLabel: "density", label: `Histogram of P(Y ≤ y): ${p.heights.map((h) => num(h, 2)).join(", ")}`,
      legend: [[boxMark("var(--tint2)"), "predictive"], [lineMark("var(--other)", DASH), "plug-in"], [lineMark("var(--ink)", 'stroke-dasharray="2 3"'), "calibrated"]],
      draw: (x, y) => p.heights.map((h, i) => `<rect x="${x(i / n) + 0.5}" y="${y(h)}" width="${x(1 / n) - x(0) - 1}" height="${y(0) - y(h)}" fill="var(--tint2)"/>`).join("")
        + path(steps(x, y, p.plugIn), "var(--other)", DASH)
        + [p.low, p.high].map((v) => `<line x1="${x(0)}" x2="${x(1)}" y1="${y(v)}" y2="${y(v)}" stroke="var(--ink)" stroke-dasharray="2 3"/>`).join(""),
    });
  }

  function reliability() {
    const own = D.reliability.own, other = D.reliability.plugIn;
    el("reliability").innerHTML = chart({
      x: [0, 1], y: [0, 1.05], xLabel: "probability of the predicted class", yLabel: "accuracy",
      label: `Accuracy by probability: ${own.map((b) => `${pct(b[0], 0)}: ${pct(b[1], 0)} of ${b[2]} rows`).join(", ")}`,
      legend: [[lineMark("var(--main)"), "predictive"], [lineMark("var(--other)", DASH), "plug-in"], [boxMark("var(--tint2)"), "calibrated"]],
      draw: (x, y) => `<line x1="${x(0)}" y1="${y(0)}" x2="${x(1)}" y2="${y(1)}" stroke="var(--soft)"/>`
        + own.map((b) => `<line x1="${x(b[0])}" x2="${x(b[0])}" y1="${y(b[3])}" y2="${y(b[4])}" stroke="var(--tint2)" stroke-width="7"/>`).join("")
        + path(other.map((b) => [x(b[0]), y(b[1])]), "var(--other)", DASH) + path(own.map((b) => [x(b[0]), y(b[1])]), "var(--main)")
        + own.map((b) => `<circle cx="${x(b[0])}" cy="${y(b[1])}" r="4" fill="var(--main)"/><text class="soft count" x="${x(b[0])}" y="${y(0.02)}" text-anchor="middle">${b[2]}</text>`).join(""),
    });
  }

  const extent = (values, zero = false) => {
    let low = zero ? 0 : Infinity, high = -Infinity;
    for (const v of values) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    if (!(high > low)) { const pad = Math.abs(high) * 0.1 || 1; low -= zero ? 0 : pad; high += pad; }
    const pad = 0.04 * (high - low);
    return [zero ? 0 : low - pad, high + pad];
  };

  function scatter() {
    const noise = R.noise.map((v) => v[D.own]), doubt = R.doubt.map((v) => v[D.own]);
    const varies = isClass || Math.max(...noise) > 1.02 * Math.min(...noise);
    const across = varies ? noise : R.mean.map((v) => v[D.own]);
    const xs = extent(across), ys = extent(doubt, true), marked = new Set(D.doubtful);
    el("scatter").innerHTML = chart({
      x: varies && xs[0] < 0 ? [0, xs[1]] : xs, y: ys, xLabel: varies ? "noise (standard deviation)" : "predicted mean", yLabel: "doubt (standard deviation)",
      label: `Doubt of ${D.shown} rows against ${varies ? "noise" : "the predicted mean"}`,
      legend: [['<circle cx="9" cy="0" r="3.5" fill="var(--main)"/>', "row"], ['<path d="M4 -5L14 5M14 -5L4 5" stroke="var(--other)" stroke-width="2"/>', "largest share of doubt"]],
      draw: (x, y) => across.map((v, i) => (marked.has(i)
        ? `<path d="M${x(v) - 4} ${y(doubt[i]) - 4}l8 8m0 -8l-8 8" stroke="var(--other)" stroke-width="2"/>`
        : `<circle cx="${x(v)}" cy="${y(doubt[i])}" r="2.5" fill="var(--main)" fill-opacity=".55"/>`)).join(""),
    });
  }

  // --- one row ----------------------------------------------------------------------------
  const named = (c) => D.classes[c];
  function bounds(values) { return [Math.min(...values), Math.max(...values)]; }

  function drawNumbers(i, k) {
    const at = R.interval[i][k], last = D.levels.length - 1, own = R.interval[i][D.own][last];
    const all = R.interval[i].map((v) => v[last]);
    const low = Math.min(...all.map((v) => v[0])), high = Math.max(...all.map((v) => v[1]));
    const start = R.start[i], step = R.step[i], heights = R.heights[i][k];
    const end = start + step * (R.heights[i][0].length - 1), y = R.y[i];
    const xs = extent([start, end, y, low, high, isCount ? start - 0.5 : start, isCount ? end + 0.5 : end]);
    const [a, b] = at[last], [a2, b2] = at[0];
    const value = (x, v) => x(Math.min(Math.max(v, xs[0]), xs[1]));
    el("predictive").innerHTML = chart({
      x: xs, y: [-180, 1080], xLabel: D.target, yTicks: false, left: 14, height: 280,
      label: `Predictive of row ${R.id[i]}: mean ${num(R.mean[i][k])}, ${pct(D.levels[last], 0)} interval ${num(a)} to ${num(b)}, observed ${num(y)}`,
      legend: [[boxMark("var(--tint2)"), `${pct(D.levels[last], 0)} interval`], [lineMark("var(--ink)", DASH), "observed"], ...(D.factors.length > 1 ? [[lineMark("var(--other)"), "bounds over priors"]] : [])],
      draw: (x, y0) => {
        const grid = heights.map((h, j) => [start + j * step, h]);
        let out = "";
        if (isCount) {
          const wide = Math.max((x(step) - x(0)) * 0.8, 1);
          out += grid.map(([v, h]) => `<rect x="${x(v) - wide / 2}" width="${wide}" y="${y0(h)}" height="${Math.max(y0(0) - y0(h), 0)}" fill="${v >= a && v <= b ? "var(--tint2)" : "var(--line)"}"/>`).join("");
        } else {
          const height = (v) => { const t = (v - start) / step, j = Math.floor(t); return j < 0 || j >= heights.length - 1 ? 0 : heights[j] + (t - j) * (heights[j + 1] - heights[j]); };
          const inside = [[a, height(a)], ...grid.filter(([v]) => v > a && v < b), [b, height(b)]].map(([v, h]) => [x(v), y0(h)]);
          out += area([[x(a), y0(0)], ...inside, [x(b), y0(0)]], "var(--tint2)") + path(grid.map(([v, h]) => [x(v), y0(h)]), "var(--main)");
        }
        out += `<line id="interval" data-lower="${a}" data-upper="${b}" x1="${value(x, a)}" x2="${value(x, b)}" y1="${y0(-60)}" y2="${y0(-60)}" stroke="var(--main)" stroke-width="3"/>`;
        out += `<line x1="${value(x, a2)}" x2="${value(x, b2)}" y1="${y0(-60)}" y2="${y0(-60)}" stroke="var(--main)" stroke-width="9"/>`;
        if (D.factors.length > 1) out += path([[x(low), y0(-105)], [x(low), y0(-145)], [x(low), y0(-125)], [x(high), y0(-125)], [x(high), y0(-105)], [x(high), y0(-145)]], "var(--other)");
        return out + `<line x1="${x(y)}" x2="${x(y)}" y1="${y0(1060)}" y2="${y0(-180)}" stroke="var(--ink)" stroke-width="1.5" ${DASH}/>`;
      },
    });
    const means = bounds(R.mean[i]);
    const rows = [["observed", num(y)], ["mean", num(R.mean[i][k])]];
    D.levels.forEach((level, l) => rows.push([`${pct(level, 0)} interval`, `${num(at[l][0])} to ${num(at[l][1])}`]));
    rows.push(["doubt, noise (sd)", `${num(R.doubt[i][k])}, ${num(R.noise[i][k])}`]);
    if (D.factors.length > 1) {
      rows.push(["mean over all these priors", `${num(means[0])} to ${num(means[1])}`], [`bounds of the ${pct(D.levels[last], 0)} interval`, `${num(low)} to ${num(high)}`]);
      if (k !== D.own) rows.push([`${pct(D.levels[last], 0)} interval as fitted`, `${num(own[0])} to ${num(own[1])}`]);
    }
    return rows.concat([["P(Y ≤ y)", num(R.rank[i], 3)]]);
  }

  function drawClasses(i, k) {
    const classes = R.classes[i], probs = R.probs[i], shown = probs[k];
    const rest = 1 - shown.reduce((s, p) => s + p, 0), tall = 24, height = 40 + tall * classes.length + 42;
    const left = Math.min(150, 24 + 7 * Math.max(...classes.map((c) => named(c).length + (c === R.y[i] ? 2 : 0))));
    const cut = (text) => (text.length > 18 ? text.slice(0, 17) + "…" : text);
    el("predictive").innerHTML = chart({
      x: [0, 1], y: [0, classes.length], xLabel: "probability", yTicks: false, left, height,
      label: `Probabilities of row ${R.id[i]}: ${classes.map((c, j) => `${named(c)} ${pct(shown[j])}`).join(", ")}`,
      legend: [[boxMark("var(--tint2)"), "probability"], ...(D.factors.length > 1 ? [[lineMark("var(--other)"), "bounds over priors"]] : [])],
      draw: (x, y) => classes.map((c, j) => {
        const [low, high] = bounds(probs.map((p) => p[j])), top = y(classes.length - j), middle = top + (y(0) - y(1)) / 2;
        let out = `<rect class="bar" data-class="${c}" data-probability="${shown[j]}" x="${x(0)}" y="${top + 3}" width="${x(shown[j]) - x(0)}" height="${y(0) - y(1) - 6}" fill="var(--tint2)"/>`;
        if (D.factors.length > 1) out += path([[x(low), middle - 4], [x(low), middle + 4], [x(low), middle], [x(high), middle], [x(high), middle - 4], [x(high), middle + 4]], "var(--other)");
        return out + `<text x="${left - 6}" y="${middle + 4}" text-anchor="end" ${c === R.y[i] ? 'font-weight="700"' : ""}>${c === R.y[i] ? "▸ " : ""}${esc(cut(named(c)))}</text>`;
      }).join(""),
    });
    const rows = [["observed", `${named(R.y[i])} (▸)`], ["predicted", `${named(R.label[i][k])}, ${pct(R.sure[i][k])}`]];
    const place = classes.indexOf(R.y[i]), [low, high] = bounds(probs.map((p) => p[place]));
    rows.push(["probability of the observed", pct(shown[place], 2)]);
    if (D.factors.length > 1) rows.push(["its bounds over all these priors", `${pct(low, 2)} to ${pct(high, 2)}`]);
    D.levels.forEach((level, l) => rows.push([`classes in the ${pct(level, 0)} set`, R.sizes[i][k][l]]));
    if (D.classes.length > classes.length) rows.push(["all other classes", pct(Math.max(rest, 0), 2)]);
    return rows.concat([["doubt, noise (sd)", `${num(R.doubt[i][k])}, ${num(R.noise[i][k])}`]]);
  }

  function why(i) {
    const found = D.why[i];
    if (!found) return "";
    let out = "";
    if (found.prior !== null) out += `<li>The prior decides ${pct(found.prior, 0)} of the doubt.</li>`;
    for (const [j, part] of found.inputs.filter(([, part]) => Math.abs(part) >= 0.005)) out += `<li>With ${esc(D.inputNames[j] ?? `input ${j}`)} at its training mean, the doubt would ${part >= 0 ? "fall" : "rise"} by ${pct(Math.abs(part), 0)}.</li>`;
    if (found.rows.length) out += `<li>Training rows that move this prediction most: ${found.rows.map(([r, e]) => `${r} (by ${num(e, 2)})`).join(", ")}.</li>`;
    return out && `<h3>Why unsure</h3><ul>${out}</ul>`;
  }

  function showRow() {
    const i = state.row, k = state.factor;
    el("row-name").textContent = `Row ${R.id[i]}`;
    const rows = isClass ? drawClasses(i, k) : drawNumbers(i, k);
    rows.push(["share of doubt (as fitted)", pct(R.share[i])], ["−log p(y) (as fitted)", num(R.nll[i])]);
    let out = `<dl>${rows.map(([name, text]) => `<div><dt>${esc(name)}</dt><dd>${esc(text)}</dd></div>`).join("")}</dl>` + why(i);
    if (R.flagged[i]) out += "<p>The computation did not reach its tolerance in this row.</p>";
    if (R.inputs[i].length) {
      const cells = R.inputs[i].map((v, j) => `<div><dt>${esc(D.inputNames[j])}</dt><dd>${esc(typeof v === "number" ? num(v, 5) : v === "" ? "missing" : v)}</dd></div>`);
      out += `<details><summary>Inputs</summary><dl>${cells.join("")}</dl></details>`;
    }
    const open = document.querySelector("#numbers details")?.open;
    el("numbers").innerHTML = out;
    if (open) document.querySelector("#numbers details")?.setAttribute("open", "");
    const slider = el("prior");
    if (slider) {
      const text = `${num(D.factors[k])}${k === D.own ? " (as fitted)" : ""}`;
      el("strength").textContent = text;
      slider.setAttribute("aria-valuetext", `precision times ${text}`);
    }
    for (const line of document.querySelectorAll("#table tbody tr")) {
      const own = Number(line.dataset.row) === i;
      line.classList.toggle("chosen", own);
      line.querySelector("button").setAttribute("aria-pressed", String(own));
    }
  }
  function select(i, move) {
    state.row = i;
    showRow();
    if (move) { el("row-name").tabIndex = -1; el("row").scrollIntoView(); el("row-name").focus({ preventScroll: true }); }
  }

  // --- the table --------------------------------------------------------------------------
  const last = D.levels.length - 1;
  const COLUMNS = isClass
    ? [["id", "row", (i) => R.id[i]], ["observed", "observed", (i) => named(R.y[i])], ["predicted", "predicted", (i) => named(R.label[i][D.own])],
       ["probability", "its probability", (i) => R.sure[i][D.own], (v) => pct(v)], ["doubt", "share of doubt", (i) => R.share[i], (v) => pct(v)],
       ["nll", "−log p(y)", (i) => R.nll[i]]]
    : [["id", "row", (i) => R.id[i]], ["observed", "observed", (i) => R.y[i]], ["mean", "mean", (i) => R.mean[i][D.own]],
       ["lower", `lower ${pct(D.levels[last], 0)}`, (i) => R.interval[i][D.own][last][0]], ["upper", `upper ${pct(D.levels[last], 0)}`, (i) => R.interval[i][D.own][last][1]],
       ["inside", "inside", (i) => (R.y[i] >= R.interval[i][D.own][last][0] && R.y[i] <= R.interval[i][D.own][last][1] ? "yes" : "no")],
       ["doubt", "share of doubt", (i) => R.share[i], (v) => pct(v)], ["nll", "−log p(y)", (i) => R.nll[i]]];
  const column = Object.fromEntries(COLUMNS.map((c) => [c[0], c]));
  const everything = R.id.map((id, i) => {
    const cells = COLUMNS.map(([, , get, text]) => (typeof get(i) === "number" && text ? text(get(i)) : typeof get(i) === "number" ? num(get(i)) : get(i)));
    return `row ${cells.join(" ")} ${R.inputs[i].join(" ")}`.toLowerCase().replaceAll("−", "-");
  });

  function matching() {
    const query = state.query.trim().toLowerCase().replaceAll("−", "-");
    const all = R.id.map((_, i) => i);
    if (!query) return all;
    const rule = query.match(/^([a-z]+)\s*([<>=])\s*(-?[\d.]+)(%?)$/);
    if (rule && column[rule[1] === "row" ? "id" : rule[1]]) {
      const get = column[rule[1] === "row" ? "id" : rule[1]][2], bound = Number(rule[3]) / (rule[4] ? 100 : 1);
      return all.filter((i) => (rule[2] === "<" ? get(i) < bound : rule[2] === ">" ? get(i) > bound : get(i) == bound));
    }
    return all.filter((i) => query.split(/\s+/).every((word) => everything[i].includes(word)));
  }

  function table() {
    const get = column[state.sort][2], sign = state.down ? -1 : 1;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : (a ?? -Infinity) - (b ?? -Infinity));
    const rows = matching().sort((i, j) => sign * compare(get(i), get(j)) || i - j);
    const pages = Math.max(Math.ceil(rows.length / PAGE), 1);
    state.page = Math.min(state.page, pages - 1);
    for (const head of document.querySelectorAll("#table thead th")) {
      const own = head.dataset.name === state.sort;
      if (own) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.querySelector("span").textContent = own ? (state.down ? " ▼" : " ▲") : "";
    }
    document.querySelector("#table tbody").innerHTML = rows.slice(state.page * PAGE, (state.page + 1) * PAGE).map((i) => `<tr data-row="${i}">`
      + COLUMNS.map(([name, , value, text]) => {
        const v = value(i), shown = esc(typeof v === "number" ? (text ?? num)(v) : v ?? "–");
        return name === "id" ? `<th scope="row"><button type="button" class="link" aria-pressed="false" aria-label="Show row ${v}">${v}</button></th>` : `<td>${shown}</td>`;
      }).join("") + "</tr>").join("");
    el("found").textContent = `${rows.length.toLocaleString("en")} of ${D.shown.toLocaleString("en")} rows`;
    el("page").textContent = `Page ${state.page + 1} of ${pages}`;
    el("previous").disabled = state.page === 0;
    el("next").disabled = state.page >= pages - 1;
    showRow();
  }

  document.querySelector("#table thead").innerHTML = `<tr>${COLUMNS.map(([name, text]) => `<th scope="col" data-name="${name}"><button type="button">${esc(text)}<span aria-hidden="true"></span></button></th>`).join("")}</tr>`;
  for (const head of document.querySelectorAll("#table thead th")) head.querySelector("button").addEventListener("click", () => {
    const name = head.dataset.name;
    state.down = state.sort === name ? !state.down : ["doubt", "nll"].includes(name);
    state.sort = name;
    state.page = 0;
    table();
  });
  const body = document.querySelector("#table tbody");
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr");
    if (line) select(Number(line.dataset.row), true);
  });
  body.addEventListener("keydown", (event) => {
    const line = event.target.closest("tr");
    const other = event.key === "ArrowDown" ? line.nextElementSibling : event.key === "ArrowUp" ? line.previousElementSibling : null;
    if (!other) return;
    event.preventDefault();
    other.querySelector("button").focus();
  });
  el("search").addEventListener("input", (event) => { state.query = event.target.value; state.page = 0; table(); });
  el("previous").addEventListener("click", () => { state.page--; table(); });
  el("next").addEventListener("click", () => { state.page++; table(); });
  el("prior")?.addEventListener("input", (event) => { state.factor = Number(event.target.value); showRow(); });
  el("doubtful").innerHTML = D.doubtful.map((i) => `<li><button type="button" class="link" data-row="${i}">Row ${R.id[i]}</button>: ${pct(R.share[i])} doubt</li>`).join("");
  el("doubtful").addEventListener("click", (event) => { if (event.target.dataset.row) select(Number(event.target.dataset.row), true); });

  if (isClass) reliability(); else calibration();
  scatter();
  table();
})();
