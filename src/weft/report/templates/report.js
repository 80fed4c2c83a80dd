// Draws the graph, the table of kernels, the panel and the scatter from the JSON in the page.
// Texts of the record reach the page by textContent and by attribute values that are never markup or addresses.
"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const data = JSON.parse(get("data").textContent);
  const { strings, kernels, nodes, views, sources, equal } = data;
  const SVG = get("drawing").namespaceURI;
  const NODE = { prim: 0, type: 1, operator: 2, location: 3, inputs: 4, steps: 5 };
  const kernelAt = new Map(kernels.map((k, i) => [k.n, i]));
  const say = (number) => (number < 0 ? "" : strings[number]);

  function make(tag, className, text) {
    const e = document.createElement(tag);
    if (className) e.className = className;
    if (text !== undefined) e.textContent = text;
    return e;
  }
  function draw(tag, attributes, className) {
    const e = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
    if (className) e.setAttribute("class", className);
    return e;
  }
  const positive = (us) => us !== null && us > 0;
  function time(us) {
    if (!positive(us)) return "–";
    if (us >= 1e6) return (us / 1e6).toFixed(2) + " s";
    return us >= 1e3 ? (us / 1e3).toFixed(3) + " ms" : us.toFixed(us < 10 ? 2 : 1) + " µs";
  }
  const alone = (k) => (k.measured ? time(k.cost) : "not measured");
  const percent = (x, digits = 1) => (x === null ? "–" : (100 * x).toFixed(digits) + " %");
  const margin = (k) => (positive(k.runnerUs) && positive(k.cost) ? k.runnerUs / k.cost - 1 : null);
  const ofBound = (k) => (positive(k.bound) && positive(k.cost) ? k.bound / k.cost : null);
  const ratio = (k) => (positive(k.predicted) && positive(k.cost) ? k.predicted / k.cost : null);
  const cut = (text, n) => (text.length <= n ? text : text.slice(0, n - 1) + "…");
  const operators = (k) => k.operators.map(say).join(", ");

  // ------------------------------------------------------------------ selection
  let selected = -1;
  function select(kernel, { scroll = false } = {}) {
    selected = kernel;
    for (const entry of entries) {
      if (entry.members.includes(kernel)) entry.row.setAttribute("aria-current", "true");
      else entry.row.removeAttribute("aria-current");
    }
    const entry = entries.find((e) => e.members.includes(kernel));
    if (entry) reach(entry);
    if (scroll && entry) {
      const box = entry.row.closest(".tall");
      box.scrollTop = entry.row.offsetTop - box.clientHeight / 2;
    }
    markBoxes();
    for (const [k, dot] of dots) dot.classList.toggle("sel", k === kernel);
    fillPanel(kernel);
  }

  // ------------------------------------------------------------------ table of kernels
  // An entry is a row: a kernel, or all kernels that are equal, with the sums of their times.
  let entries = [], hits = null;
  const single = kernels.map((k, i) => ({ ...k, members: [i] }));
  const sum = (found, field) => found.reduce((s, k) => (s === null || k[field] === null ? null : s + k[field]), 0);
  function folded() {
    const groups = new Map();
    equal.forEach((first, i) => { if (!groups.has(first)) groups.set(first, []); groups.get(first).push(i); });
    return [...groups].map(([first, members]) => {
      const found = members.map((i) => kernels[i]), sums = {};
      for (const field of ["cost", "share", "bound", "predicted", "runnerUs"]) sums[field] = sum(found, field);
      return { ...kernels[first], ...sums, measured: found.every((k) => k.measured), members };
    });
  }
  const COLUMNS = [
    { head: "Kernel", key: (k) => k.n, number: false },
    { head: "Time", key: (k) => k.cost, show: (k) => alone(k), number: true },
    { head: "Share", key: (k) => k.share, show: (k) => percent(k.share), number: true, bar: true },
    { head: "Primitives", key: (k) => say(k.prims), show: (k) => say(k.prims), cut: true },
    { head: "Operators", key: operators, show: operators, cut: true },
    { head: "Margin", key: margin, show: (k) => percent(margin(k)), number: true },
    { head: "Of bound", key: ofBound, show: (k) => percent(ofBound(k), 0), number: true },
    { head: "Pred./meas.", key: ratio, show: (k) => (ratio(k) === null ? "–" : ratio(k).toFixed(2)), number: true },
    { head: "Schedule", key: (k) => say(k.schedule), show: (k) => say(k.schedule), cut: true },
    { head: "Runner-up", key: (k) => (k.runner < 0 ? null : say(k.runner)), show: (k) => (k.runner < 0 ? "–" : `${time(k.runnerUs)} ${say(k.runner)}`), cut: true },
  ];
  let order = { column: 1, down: true };
  const maxShare = Math.max(...kernels.map((k) => k.share || 0), 1e-9);
  let widest = maxShare;

  function buildTable() {
    const head = get("kernel-table").tHead.rows[0];
    COLUMNS.forEach((c, i) => {
      const th = make("th", c.number ? "num" : "");
      th.scope = "col";
      const button = make("button", "", c.head);
      button.type = "button";
      button.addEventListener("click", () => {
        order = { column: i, down: order.column === i ? !order.down : Boolean(c.number) };
        sortTable();
      });
      th.append(button);
      head.append(th);
    });
    const repeated = equal.some((first, i) => first !== i);
    get("fold").closest("label").hidden = !repeated;
    get("fold").addEventListener("change", () => fillTable(get("fold").checked));
    get("filter").addEventListener("input", filterTable);
    get("kernel-table").tBodies[0].addEventListener("keydown", onRowKey);
    fillTable(false);
  }
  function fillTable(fold) {
    entries = (fold ? folded() : single).map((e) => ({ ...e }));
    widest = Math.max(...entries.map((e) => e.share || 0), 1e-9);
    for (const e of entries) e.row = buildRow(e);
    get("kernel-table").tBodies[0].replaceChildren();
    sortTable();
    filterTable();
    if (selected >= 0) select(selected);
  }
  function reach(entry) {  // the one row that Tab comes to
    for (const e of entries) e.row.querySelector("button").tabIndex = e === entry ? 0 : -1;
  }
  function onRowKey(event) {
    const shown = [...get("kernel-table").tBodies[0].rows].filter((row) => !row.hidden), at = shown.indexOf(event.target.closest("tr"));
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (at < 0 || next === undefined || !shown[next] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    reach(entries.find((e) => e.row === shown[next]));
    shown[next].querySelector("button").focus();
  }
  function buildRow(k) {
    const tr = make("tr");
    for (const c of COLUMNS) {
      const td = make("td", c.number ? "num" : c.cut ? "cut" : "");
      if (!c.show) {
        const several = k.members.length > 1;
        const button = make("button", "", several ? `${k.members.length} × ${k.n}` : String(k.n));
        button.type = "button";
        button.setAttribute("aria-label", several ? `${k.members.length} kernels like ${k.n}: details` : `kernel ${k.n}: details`);
        td.append(button);
      } else {
        td.textContent = c.show(k);
        if (c.cut) td.title = c.show(k);
      }
      if (c.bar) {
        const bar = draw("svg", { viewBox: "0 0 64 4", "aria-hidden": "true" }, "share");
        bar.append(draw("rect", { width: 64, height: 4 }, "track"), draw("rect", { width: (64 * (k.share || 0)) / widest, height: 4 }, "fill"));
        td.append(bar);
      }
      tr.append(td);
    }
    tr.addEventListener("click", () => {
      const next = k.members[(k.members.indexOf(selected) + 1) % k.members.length];  // of equal ones each click shows the next
      select(next);
      showKernel(next);
    });
    return tr;
  }
  function sortTable() {
    const { key } = COLUMNS[order.column], sign = order.down ? -1 : 1;
    const found = entries.map((k, i) => [key(k), i]);
    found.sort(([a, i], [b, j]) => {
      if (a === null || b === null) return a === b ? i - j : a === null ? 1 : -1;
      return (typeof a === "string" ? sign * a.localeCompare(b) : sign * (a - b)) || i - j;
    });
    get("kernel-table").tBodies[0].append(...found.map(([, i]) => entries[i].row));
    [...get("kernel-table").tHead.rows[0].cells].forEach((th, i) => {
      if (i === order.column) th.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
  }
  function filterTable() {
    const wanted = get("filter").value.trim().toLowerCase();
    const fits = (k) => `${k.n} ${say(k.prims)} ${operators(k)} ${say(k.schedule)}`.toLowerCase().includes(wanted);
    hits = wanted ? new Set(kernels.flatMap((k, i) => (fits(k) ? [i] : []))) : null;
    for (const e of entries) e.row.hidden = hits !== null && !e.members.some((i) => hits.has(i));
    const shown = hits ? hits.size : kernels.length, lines = entries.filter((e) => !e.row.hidden);
    const all = shown === kernels.length ? `${shown} kernels` : `${shown} of ${kernels.length} kernels`;
    get("count").textContent = lines.length === shown ? all : `${all} in ${lines.length} ${lines.length === 1 ? "row" : "rows"}`;
    if (lines.length && !lines.some((e) => e.row.querySelector("button").tabIndex === 0)) reach(lines.find((e) => e.members.includes(selected)) || lines[0]);
    markHits();
    const first = hits ? boxes.findIndex((_, i) => kernelsOf(i).some((k) => hits.has(k))) : -1;
    if (first >= 0) centre(first);
  }

  // ------------------------------------------------------------------ panel
  function list(title, numbers) {
    if (!numbers.length) return [];
    const ul = make("ul");
    for (const n of numbers) ul.append(make("li", "code", say(n)));
    return [make("h4", "", title), ul];
  }
  function pairs(found) {
    const dl = make("dl");
    for (const [name, value] of found) if (value) dl.append(make("dt", "", name), make("dd", "", value));
    return dl;
  }
  function whyChosen(k) {
    if (!k.measured) return "Nobody measured this kernel in this compilation: it is the framework's own call, which stands in at a price that is a guess.";
    if (!k.tried && k.runner < 0) return "Nothing was measured for this kernel in this compilation: it is the framework's own call or a plan that was known.";
    const first = k.tried
      ? `${k.tried} ${k.tried === 1 ? "kernel was" : "kernels were"} measured for this problem, ${k.rejected} of them rejected as wrong or failing.`
      : "Its time comes from the first survey or the database; the search measured nothing else for this problem.";
    if (k.runner < 0) return `${first} No other kernel was accepted.`;
    const m = margin(k);
    const gap = m === null ? "" : m >= 0 ? `: ${percent(m)} more` : `: ${percent(-m)} less alone, but the plan with it is dearer`;
    return `${first} The runner-up, ${say(k.runner)}, takes ${time(k.runnerUs)}${gap}.`;
  }
  function fillPanel(i) {
    const panel = get("panel"), k = kernels[i];
    if (!k) { panel.replaceChildren(make("p", "dim", "Select a kernel in the table or the graph.")); return; }
    const all = [make("h3", "", `Kernel ${k.n}`), make("p", "code", `${say(k.kind)} · ${say(k.schedule)}`)];
    all.push(pairs([
      ["Time alone", k.measured && k.share !== null ? `${time(k.cost)}, ${percent(k.share)} of the plan` : alone(k)],
      ["In the plan", positive(k.inPlace) ? time(k.inPlace) : ""],
      ["Lower bound", ofBound(k) !== null ? `${time(k.bound)}: it runs at ${percent(ofBound(k), 0)} of that speed` : positive(k.bound) ? time(k.bound) : ""],
      ["Predicted", ratio(k) !== null ? `${time(k.predicted)}, ${ratio(k).toFixed(2)} of measured` : positive(k.predicted) ? time(k.predicted) : ""],
      ["Primitives", `${k.count}: ${say(k.prims)}`],
      ["Written in", say(k.written)],
      ["Of an SM", k.sm === undefined ? "" : say(k.sm)],
    ]));
    all.push(make("h4", "", "Why this kernel"), make("p", "", whyChosen(k)));
    all.push(make("h4", "", "Why it is not fused further"), ...notFused(k));
    all.push(...list("Operators it comes from", k.operators), ...list("Reads", k.inputs), ...list("Writes", k.outputs));
    if (nodes.length && k.nodes.length) {
      const chips = make("div", "chips");
      for (const n of k.nodes.slice(0, 60)) {
        if (!nodes[n]) continue;
        const b = make("button", "", `%${n} ${say(nodes[n][NODE.prim])}`);
        b.type = "button";
        b.addEventListener("click", () => showNode(n));
        chips.append(b);
      }
      all.push(make("h4", "", "Its primitives in the graph"), chips);
      if (k.nodes.length > 60) all.push(make("p", "dim", `and ${k.nodes.length - 60} more`));
    }
    const pre = make("pre", "", k.source < 0 ? "left out: this page would be too large" : sources[k.source] || "(no text)");
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", `source of kernel ${k.n}`);
    all.push(make("h4", "", "Source"), pre);
    panel.replaceChildren(...all);
    panel.scrollTop = 0;
  }
  function notFused(k) {
    if (!k.near.length) return [make("p", "dim", "No larger candidate that the chosen kernels around it could be replaced by.")];
    const table = make("table"), head = make("tr"), body = make("tbody"), box = make("div", "scroll");
    for (const [name, number] of [["Fused with", 0], ["Together", 1], ["Apart", 1]]) {
      const th = make("th", number ? "num" : "", name);
      th.scope = "col";
      head.append(th);
    }
    for (const [what, together, apart, reason] of k.near) {
      const tr = make("tr"), first = make("td");
      first.append(make("span", "code", cut(say(what), 120)), make("br"), make("span", "dim", say(reason)));
      tr.append(first, make("td", "num", time(together)), make("td", "num", time(apart)));
      body.append(tr);
    }
    table.append(make("thead"), body);
    table.tHead.append(head);
    box.append(table);
    return [box];
  }

  // ------------------------------------------------------------------ graph
  const CELL = { folded: [176, 64, 160, 34], kernels: [176, 64, 160, 34], primitives: [128, 56, 114, 30], all: [128, 56, 114, 30] };
  let view = null, name = "", now = -1, users = [], boxes = [], scale = 1, shift = [0, 0];

  const middle = (i) => [view.x[i] * CELL[name][0], view.y[i] * CELL[name][1]];
  const ofKernels = () => name === "kernels" || name === "folded";
  function kernelsOf(i) {
    if (name === "folded") return view.members[i];
    return name === "kernels" ? [i] : nodes[view.ids[i]][NODE.steps].map((s) => kernelAt.get(s)).filter((k) => k !== undefined);
  }
  function colourOf(found) {
    if (!found.length) return "none";
    if (get("colour").value === "kernel") return `c${kernels[found[0]].n % 8}`;
    return `h${Math.min(4, Math.floor((5 * Math.max(...found.map((k) => kernels[k].share || 0))) / maxShare))}`;
  }
  function labelOf(i) {
    if (ofKernels()) {
      const all = kernelsOf(i), k = kernels[all[0]], times = all.length > 1 ? `${all.length} × ` : "";
      return cut(`${times}${k.n} · ${say(k.prims)}`, 21);
    }
    const found = kernelsOf(i), text = say(nodes[view.ids[i]][NODE.prim]);
    return cut(found.length ? `${text} ·${kernels[found[0]].n}` : text, 15);
  }
  function describe(i) {
    if (ofKernels() && kernelsOf(i).length > 1) {
      const all = kernelsOf(i).map((m) => kernels[m]), cost = sum(all, "cost"), share = sum(all, "share");
      const numbers = cut(all.map((k) => k.n).join(", "), 60);
      const spent = all.every((k) => k.measured) && share !== null ? `${time(cost)} together, ${percent(share)} of the plan` : "not all measured";
      return [`kernels ${numbers}: ${say(all[0].prims)}`, spent, `${all.length} equal layers`];
    }
    if (ofKernels()) {
      const k = kernels[kernelsOf(i)[0]];
      return [`kernel ${k.n}: ${say(k.prims)}`, k.measured && k.share !== null ? `${time(k.cost)}, ${percent(k.share)} of the plan` : alone(k), operators(k)];
    }
    const id = view.ids[i], n = nodes[id], found = kernelsOf(i);
    const by = found.length ? `kernel ${found.map((k) => kernels[k].n).join(", ")}` : "no kernel: it costs nothing";
    const from = [say(n[NODE.operator]), say(n[NODE.location])].filter(Boolean).join(" at ");
    return [`%${id} ${say(n[NODE.prim])} ${say(n[NODE.type])}`, by, from];
  }
  function curve(path, a, b) {
    const [x1, y1] = middle(a), [x2, y2] = middle(b), [, cell, w, height] = CELL[name], h = height / 2;
    const around = view.y[b] - view.y[a] > 1 && Math.abs(x2 - x1) < w / 2;  // pass the boxes between on their right
    const bend = around ? cell * 0.9 : Math.min(60, (y2 - y1) / 2), side = around ? w * 0.95 : 0;
    const at = (v) => v.toFixed(0);
    path.push(`M${at(x1)} ${at(y1 + h)}C${at(x1 + side)} ${at(y1 + h + bend)} ${at(x2 + side)} ${at(y2 - h - bend)} ${at(x2)} ${at(y2 - h)}`);
  }
  function setView(next) {
    name = views[next] ? next : "kernels";
    view = views[name];
    get("view").value = name;
    now = -1;
    users = view.ids.map(() => []);
    const path = [], [, , w, h] = CELL[name];
    view.in.forEach((sources, i) => { for (const s of sources) { users[s].push(i); curve(path, s, i); } });
    get("edges").setAttribute("d", path.join(""));
    get("edges-near").setAttribute("d", "");
    boxes = view.ids.map((id, i) => {
      const [x, y] = middle(i), g = draw("g", { id: `n${i}`, role: "option", "aria-selected": "false", "aria-label": describe(i).join("; ") }, "box");
      const text = draw("text", { x: x.toFixed(0), y });
      text.textContent = labelOf(i);
      const box = { x: (x - w / 2).toFixed(0), y: y - h / 2, width: w, height: h };
      g.append(draw("rect", box, "under"), draw("rect", box), text);
      g.dataset.i = i;
      return g;
    });
    get("boxes").replaceChildren(...boxes);
    paint();
    markBoxes();
    markHits();
    survey();
    start();
  }
  function markHits() {
    boxes.forEach((g, i) => g.classList.toggle("off", hits !== null && !kernelsOf(i).some((k) => hits.has(k))));
  }
  function survey() {  // the overview: all boxes as one path
    const [, , w, h] = CELL[name], [fw, fh] = extent(), wide = Math.max(fw, fh / 6), high = Math.max(fh, fw / 6);
    const path = view.ids.map((_, i) => { const [x, y] = middle(i); return `M${(x - w / 2).toFixed(0)} ${y - h / 2}h${w}v${h}h-${w}z`; });
    get("over-boxes").setAttribute("d", path.join(""));
    get("overview").setAttribute("viewBox", `${-w / 2} ${-h / 2} ${wide} ${high}`);
    const size = Math.min(150 / wide, 200 / high);
    get("overview").setAttribute("width", (wide * size).toFixed(0));
    get("overview").setAttribute("height", (high * size).toFixed(0));
  }
  function overAt(event) {
    const box = get("overview").getBoundingClientRect(), [x, y, w, h] = get("overview").getAttribute("viewBox").split(" ").map(Number), [fw, fh] = frame();
    const at = [x + ((event.clientX - box.left) / box.width) * w, y + ((event.clientY - box.top) / box.height) * h];
    shift = [fw / 2 - at[0] * scale, fh / 2 - at[1] * scale];
    place();
  }
  function paint() {
    boxes.forEach((g, i) => {
      const found = kernelsOf(i);
      g.children[1].setAttribute("class", colourOf(found));
      g.classList.toggle("several", found.length > 1);
    });
  }
  function markBoxes() {
    let any = false;
    boxes.forEach((g, i) => {
      const mine = selected >= 0 && kernelsOf(i).includes(selected);
      any = any || mine;
      g.classList.toggle("sel", mine);
      g.setAttribute("aria-selected", String(mine));
    });
    get("boxes").classList.toggle("picked", any);
  }
  function place() {
    get("world").setAttribute("transform", `translate(${shift[0].toFixed(1)} ${shift[1].toFixed(1)}) scale(${scale.toFixed(4)})`);
    get("drawing").classList.toggle("far", scale < 0.4);
    const [fw, fh] = frame(), seen = [-shift[0] / scale, -shift[1] / scale, fw / scale, fh / scale];
    for (const [i, at] of ["x", "y", "width", "height"].entries()) get("over-frame").setAttribute(at, seen[i].toFixed(0));
    const [w, h] = view ? extent() : [0, 0];
    get("overview").toggleAttribute("hidden", w * scale <= fw && h * scale <= fh);
  }
  function extent() {
    const [cx, cy, w, h] = CELL[name];
    return [Math.max(...view.x, 0) * cx + w, Math.max(...view.y, 0) * cy + h];
  }
  const frame = () => [get("canvas").clientWidth, get("canvas").clientHeight];
  function fit() {
    const [w, h] = extent(), [fw, fh] = frame(), [, , bw, bh] = CELL[name];
    scale = Math.min(1.2, (fw - 30) / w, (fh - 30) / h);
    shift = [(fw - w * scale) / 2 + (bw / 2) * scale, (fh - h * scale) / 2 + (bh / 2) * scale];
    place();
  }
  function start() {
    if (!view.ids.length) { place(); return; }
    const [w, h] = extent(), [fw, fh] = frame();
    if (Math.min((fw - 30) / w, (fh - 30) / h) >= 0.6) { fit(); return; }
    const first = view.y.indexOf(0);
    scale = Math.max(0.6, Math.min(1, (fw - 30) / w));
    shift = [fw / 2 - middle(first)[0] * scale, 30];
    if (w * scale < fw) shift[0] = (fw - w * scale) / 2 + (CELL[name][2] / 2) * scale;
    place();
  }
  function zoom(factor, at) {
    const [fw, fh] = frame(), [x, y] = at || [fw / 2, fh / 2], next = Math.min(3, Math.max(0.02, scale * factor));
    shift = [x - ((x - shift[0]) * next) / scale, y - ((y - shift[1]) * next) / scale];
    scale = next;
    place();
  }
  function centre(i, force) {
    const [x, y] = middle(i), [fw, fh] = frame(), at = [x * scale + shift[0], y * scale + shift[1]];
    if (!force && at[0] > 70 && at[0] < fw - 70 && at[1] > 40 && at[1] < fh - 40) return;
    scale = Math.max(scale, 0.6);
    shift = [fw / 2 - x * scale, fh / 2 - y * scale];
    place();
  }
  function goTo(i, force) {
    if (boxes[now]) boxes[now].classList.remove("now");
    now = i;
    boxes[i].classList.add("now");
    get("canvas").setAttribute("aria-activedescendant", `n${i}`);
    const path = [];
    for (const s of view.in[i]) curve(path, s, i);
    for (const u of users[i]) curve(path, i, u);
    get("edges-near").setAttribute("d", path.join(""));
    get("status").textContent = describe(i).filter(Boolean).join(" · ");
    centre(i, force);
  }
  function pick(i) {
    goTo(i);
    const found = kernelsOf(i);
    if (!found.length) return;
    const next = found.indexOf(selected);  // a value that several kernels compute: each click shows the next
    select(found[(next + 1) % found.length], { scroll: true });
  }
  function showNode(id) {
    if (ofKernels() || !view.ids.includes(id)) setView(views.primitives && views.primitives.ids.includes(id) ? "primitives" : "all");
    const i = view.ids.indexOf(id);
    if (i >= 0) goTo(i, true);
  }
  function showKernel(k) {
    const i = boxes.findIndex((_, j) => kernelsOf(j).includes(k));
    if (i >= 0) goTo(i);
  }
  function step(key) {
    if (now < 0) { goTo(0); return; }
    const near = key === "ArrowUp" ? view.in[now] : key === "ArrowDown" ? users[now] : null;
    if (near) {
      if (near.length) goTo(near.reduce((a, b) => (Math.abs(view.x[b] - view.x[now]) < Math.abs(view.x[a] - view.x[now]) ? b : a)));
      return;
    }
    const side = key === "ArrowRight" ? 1 : -1;
    let best = -1;
    view.ids.forEach((_, i) => {
      const gap = side * (view.x[i] - view.x[now]);
      if (view.y[i] === view.y[now] && gap > 0 && (best < 0 || gap < side * (view.x[best] - view.x[now]))) best = i;
    });
    if (best >= 0) goTo(best);
  }
  function onKey(event) {
    const arrows = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (arrows[event.key] && event.shiftKey) { shift = shift.map((s, i) => s + arrows[event.key][i]); place(); }
    else if (arrows[event.key] && view.ids.length) step(event.key);
    else if (event.key === "Enter" || event.key === " ") { if (now >= 0) pick(now); }
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else if (event.key === "Escape") select(-1);
    else return;
    event.preventDefault();
  }
  function buildGraph() {
    const canvas = get("canvas"), tip = get("tip");
    for (const option of [...get("view").options]) if (!views[option.value]) option.remove();
    get("view").addEventListener("change", () => { setView(get("view").value); if (selected >= 0) showKernel(selected); });
    get("colour").addEventListener("change", paint);
    get("zoom-in").addEventListener("click", () => zoom(1.25));
    get("zoom-out").addEventListener("click", () => zoom(0.8));
    get("zoom-fit").addEventListener("click", fit);
    get("zoom-top").addEventListener("click", start);
    canvas.addEventListener("keydown", onKey);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(event.deltaY < 0 ? 1.15 : 0.87, [event.clientX - box.left, event.clientY - box.top]);
    }, { passive: false });
    const boxAt = (event) => { const g = event.target.closest(".box"); return g ? Number(g.dataset.i) : -1; };
    let drag = null;
    const overview = get("overview");
    overview.addEventListener("pointerdown", (event) => { event.stopPropagation(); event.preventDefault(); overview.setPointerCapture(event.pointerId); overAt(event); });
    overview.addEventListener("pointermove", (event) => { event.stopPropagation(); tip.hidden = true; if (overview.hasPointerCapture(event.pointerId)) overAt(event); });
    overview.addEventListener("click", (event) => event.stopPropagation());
    canvas.addEventListener("pointerdown", (event) => { if (event.button === 0) drag = [event.clientX, event.clientY, false]; });
    window.addEventListener("pointerup", () => { canvas.classList.remove("drag"); setTimeout(() => { drag = null; }, 0); });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && (drag[2] || Math.hypot(event.clientX - drag[0], event.clientY - drag[1]) > 4)) {
        shift = [shift[0] + event.clientX - drag[0], shift[1] + event.clientY - drag[1]];
        drag = [event.clientX, event.clientY, true];
        canvas.classList.add("drag");
        tip.hidden = true;
        place();
        return;
      }
      const i = boxAt(event);
      tip.hidden = i < 0;
      if (i < 0) return;
      const [title, ...lines] = describe(i), box = canvas.getBoundingClientRect();
      tip.replaceChildren(make("b", "", title), ...lines.filter(Boolean).map((line) => make("div", "", line)));
      const x = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 6);
      const y = Math.min(event.clientY - box.top + 16, box.height - tip.offsetHeight - 6);
      tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("click", (event) => { const i = boxAt(event); if (i >= 0 && !(drag && drag[2])) pick(i); });
    setView(nodes.length && nodes.length <= 400 ? "primitives" : views.folded ? "folded" : "kernels");
  }

  // ------------------------------------------------------------------ scatter
  const dots = new Map();
  function buildScatter() {
    const found = kernels.map((k, i) => [k, i]).filter(([k]) => positive(k.cost) && positive(k.predicted));
    const svg = get("scatter");
    if (!found.length) { svg.setAttribute("hidden", ""); get("scatter-none").hidden = false; svg.classList.add("sr"); return; }
    const all = found.flatMap(([k]) => [k.cost, k.predicted]).map(Math.log10);
    let low = Math.min(...all) - 0.15, high = Math.max(...all) + 0.15;
    if (high - low < 1) { const m = (high + low) / 2; low = m - 0.5; high = m + 0.5; }
    const L = 66, R = 704, T = 12, B = 372;
    const px = (v) => L + ((v - low) / (high - low)) * (R - L), py = (v) => B - ((v - low) / (high - low)) * (B - T);
    const two = Math.log10(2), clamp = (v) => Math.min(high, Math.max(low, v));
    const band = [[low, low + two], [high - two, high], [high, high], [high, high - two], [low + two, low], [low, low]];
    svg.append(draw("polygon", { points: band.map(([a, b]) => `${px(clamp(a))},${py(clamp(b))}`).join(" ") }, "band"));
    for (let e = Math.floor(low); e <= Math.ceil(high); e++) {
      for (const m of high - low > 2.5 ? [1] : [1, 2, 5]) {
        const v = e + Math.log10(m);
        if (v < low || v > high) continue;
        const text = time(m * 10 ** e).replace(/\.0+ /, " ");
        const tx = draw("text", { x: px(v), y: B + 18, "text-anchor": "middle" }), ty = draw("text", { x: L - 8, y: py(v) + 4, "text-anchor": "end" });
        tx.textContent = ty.textContent = text;
        svg.append(draw("line", { x1: px(v), x2: px(v), y1: T, y2: B }, "grid"), draw("line", { x1: L, x2: R, y1: py(v), y2: py(v) }, "grid"), tx, ty);
      }
    }
    svg.append(draw("line", { x1: px(low), y1: py(low), x2: px(high), y2: py(high) }, "ideal"));
    svg.append(draw("line", { x1: L, x2: R, y1: B, y2: B }, "axis"), draw("line", { x1: L, x2: L, y1: T, y2: B }, "axis"));
    const xl = draw("text", { x: (L + R) / 2, y: B + 40, "text-anchor": "middle" }), yl = draw("text", { transform: `translate(12 ${(T + B) / 2}) rotate(-90)`, "text-anchor": "middle" });
    xl.textContent = "predicted"; yl.textContent = "measured";
    svg.append(xl, yl);
    for (const [k, i] of found) {
      const dot = draw("circle", { cx: px(Math.log10(k.predicted)), cy: py(Math.log10(k.cost)), r: 5 }), title = draw("title", {});
      title.textContent = `kernel ${k.n}: predicted ${time(k.predicted)}, measured ${time(k.cost)}`;
      dot.append(title);
      dot.addEventListener("click", () => { select(i, { scroll: true }); showKernel(i); get("kernels").scrollIntoView(); });
      dots.set(i, dot);
      svg.append(dot);
    }
  }

  buildTable();
  buildScatter();
  buildGraph();
  if (kernels.length) {
    const dearest = kernels.reduce((best, k, i) => ((k.cost || 0) > (kernels[best].cost || 0) ? i : best), 0);
    select(dearest);
  }
})();
