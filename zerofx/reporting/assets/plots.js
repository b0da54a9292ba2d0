"use strict";
/* Memory over the program, the streams over time, and the pipeline's schedule; uPlot draws axes, zoom and cursor. */
zx.axes = (x, y) => [x, y].map((axis) => ({ stroke: zx.colour("text"), grid: { stroke: zx.colour("line"), width: 1 }, ticks: { stroke: zx.colour("line") }, font: "12px system-ui", labelFont: "13px system-ui", ...axis }));

zx.plot = function (place, options, data) {
  const width = Math.max(400, place.clientWidth || 900);
  const plot = new uPlot({ width, ...options }, data, place);
  zx.plots.push(plot);
  return plot;
};

/* Memory: the bytes at each node, and what is alive at the cursor. */
zx.views.memory = function (main) {
  const program = zx.program;
  if (!program.memory.length) { main.append(zx.el("p", { class: "page" }, program.missing || "There are no numbers for this program.")); return; }
  const last = program.steps.length - 1, graphs = zx.graphs(program, last);
  const at = [], all = [], gathered = [];
  for (const part of program.memory) {
    const graph = graphs.find((each) => each.name === part.graph);
    const change = new Float64Array(part.length + 1), held = new Float64Array(part.length + 1);
    for (const [name, , size, first, end] of part.storages) {
      const node = zx.maker(graphs, part.graph, name);
      change[first] += size; change[end + 1] -= size;
      if (node?.role === "unshard") { held[first] += size; held[end + 1] -= size; }
    }
    let now = part.held, open = 0;
    for (let place = 0; place < part.length; place++) {
      now += change[place]; open += held[place];
      at.push({ part, place, node: graph.nodes[place] });
      all.push(now + (part.extra[place] || 0)); gathered.push(open);
    }
  }
  const peak = all.indexOf(Math.max(...all));
  const table = zx.el("div", {}), chart = zx.el("div", { class: "plot" }), pinned = zx.el("p", { class: "soft" }, "Move over the curve to see what is alive there; a click keeps it.");
  main.append(zx.el("div", { class: "wide" }, zx.el("h2", {}, "Memory over the program, as foreseen from shapes"), zx.el("p", {}, program.words.find((text) => text.startsWith("Besides")) || ""), pinned, zx.el("div", { class: "split" }, chart, table)));
  let kept = false;
  const tell = (place) => table.replaceChildren(...zx.alive(at[place], all[place], graphs));
  const bytes = (u, values) => values.map((value) => zx.bytes(value));
  zx.plot(chart, {
    height: 420, cursor: { drag: { x: true, y: false } }, scales: { x: { time: false }, y: { range: (u, low, high) => [0, high * 1.05 || 1] } },
    axes: zx.axes({ label: "node, in the order of execution" }, { values: bytes, size: 84 }),
    series: [{ label: "node", value: (u, v) => (v === null ? "" : `${at[v].part.graph} ${at[v].node?.name || "output"}`) },
      { label: "all", stroke: zx.colour("link"), fill: zx.colour("link") + "33", paths: uPlot.paths.stepped({ align: 1 }), value: (u, v) => (v === null ? "" : zx.bytes(v)), points: { show: false } },
      { label: "gathered parameters", stroke: zx.colour("scatter"), fill: zx.colour("scatter") + "44", paths: uPlot.paths.stepped({ align: 1 }), value: (u, v) => (v === null ? "" : zx.bytes(v)), points: { show: false } }],
    hooks: {
      setCursor: [(u) => { if (!kept && u.cursor.left >= 0 && u.cursor.idx !== null && u.cursor.idx !== undefined) tell(u.cursor.idx); }],
      draw: [(u) => zx.boundaries(u, at)],
    },
  }, [all.map((_, i) => i), all, gathered]);
  chart.addEventListener("click", () => { kept = !kept; pinned.textContent = kept ? "Kept; click again to follow the cursor." : "Move over the curve to see what is alive there; a click keeps it."; });
  tell(peak);
};

/* The node that made a storage: in the forward, for what the backward was handed. */
zx.maker = (graphs, name, node) => graphs.find((each) => each.name === name)?.byName.get(node) || graphs[0].byName.get(node);

zx.boundaries = function (u, at) {
  const { ctx } = u;
  ctx.save(); ctx.strokeStyle = ctx.fillStyle = zx.colour("soft"); ctx.font = "13px system-ui"; ctx.textAlign = "left"; ctx.setLineDash([5, 4]);
  at.forEach(({ part, place }, i) => {
    if (place) return;
    const x = u.valToPos(i, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
    ctx.beginPath(); ctx.moveTo(x, u.bbox.top); ctx.lineTo(x, u.bbox.top + u.bbox.height); ctx.stroke(); ctx.fillText(part.graph, x + 6, u.bbox.top + 14);
  });
  ctx.restore();
};

zx.alive = function ({ part, place, node }, total, graphs) {
  const alive = part.storages.filter(([, , , first, end]) => first <= place && place <= end).sort((a, b) => b[2] - a[2]);
  const rows = alive.slice(0, 25).map(([name, result, size]) => {
    const made = zx.maker(graphs, part.graph, name);
    return zx.el("tr", {}, zx.el("td", { class: "number" }, zx.bytes(size)), zx.el("td", {}, zx.linkLast(name), made?.role === "unshard" ? [" ", zx.el("span", { class: "chip gather" }, "gathered")] : "", zx.el("br"), zx.el("span", { class: "soft" }, (made?.params.length > 1 ? made.params[result] : made?.params[0]) || made?.module || "")));
  });
  return [zx.el("h3", {}, `At ${part.graph} ${node?.name || "output"}: ${zx.bytes(total)}`), zx.el("p", { class: "soft" }, `${alive.length} tensors`, part.held ? `, and ${zx.bytes(part.held)} that the caller holds (inputs, results)` : ""),
    zx.el("table", {}, zx.el("tbody", {}, rows)), alive.length > 25 ? zx.el("p", { class: "soft" }, `and ${alive.length - 25} smaller ones`) : null].filter(Boolean);
};
zx.linkLast = (name) => zx.el("button", { class: "link mono", onclick: () => zx.reveal(name, zx.program.steps.length - 1) }, name);

/* Boxes on rows: for the timeline and for the pipeline. Each is { row, start, end, colour, label, told }. */
zx.rows = function (chart, tip, boxes, rows, unit, height) {
  const end = Math.max(...boxes.map((box) => box.end), 1e-12), xs = boxes.flatMap((b) => [b.start, b.end]).sort((a, b) => a - b);
  const plot = zx.plot(chart, {
    height: height || 70 + rows.length * 56, legend: { show: false }, cursor: { drag: { x: true, y: false }, points: { show: false } },
    scales: { x: { time: false, range: (u, low, high) => [low, high] }, y: { dir: -1, range: () => [0, rows.length] } },
    axes: zx.axes({ values: (u, values) => values.map(unit) }, { splits: rows.map((_, i) => i + 0.5), values: () => rows, size: 96, grid: { show: false }, ticks: { show: false } }),
    series: [{}, { stroke: "transparent", points: { show: false } }],
    hooks: {
      draw: [(u) => zx.boxes(u, boxes)],
      setCursor: [(u) => {
        const x = u.posToVal(u.cursor.left, "x"), row = Math.floor(u.posToVal(u.cursor.top, "y"));
        const hit = boxes.find((box) => box.row === row && box.start <= x && x <= box.end);
        tip.textContent = hit ? hit.told : "Move over a box to read it; drag to zoom, double-click for all.";
      }],
    },
  }, [[0, ...xs, end], new Array(xs.length + 2).fill(null)]);
  tip.textContent = "Move over a box to read it; drag to zoom, double-click for all.";
  return plot;
};

zx.boxes = function (u, boxes) {
  const { ctx } = u, { left, top, width, height } = u.bbox, scale = devicePixelRatio || 1;
  ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip(); ctx.font = `${11 * scale}px system-ui`; ctx.textBaseline = "middle"; ctx.textAlign = "left";
  for (const box of boxes) {
    const x = u.valToPos(box.start, "x", true), w = Math.max(0.7, u.valToPos(box.end, "x", true) - x);
    if (x + w < left || x > left + width) continue;
    const y = u.valToPos(box.row + 0.14, "y", true), h = u.valToPos(box.row + 0.86, "y", true) - y;
    ctx.fillStyle = box.colour; ctx.fillRect(x, y, w, h);
    if (w > 3) { ctx.strokeStyle = zx.colour("back"); ctx.lineWidth = 0.6; ctx.strokeRect(x, y, w, h); }
    if (box.label && w > 7 * scale * box.label.length) { ctx.fillStyle = box.ink || zx.colour("text"); ctx.fillText(box.label, x + 4 * scale, y + h / 2); }
  }
  ctx.restore();
};

zx.views.timeline = function (main) {
  const program = zx.program;
  if (!program.spans.length) { main.append(zx.el("p", { class: "page" }, program.missing || "There is no timeline for this program.")); return; }
  const streams = [...new Set(["compute", ...program.spans.map((span) => span[2])])];
  const colours = { kernel: zx.colour("kernel"), wait: zx.colour("exposed"), all_gather: zx.colour("gather"), reduce_scatter: zx.colour("scatter"), all_reduce: zx.colour("reduce") };
  const boxes = program.spans.map(([name, kind, stream, part, start, end, , nbytes]) => {
    const key = kind === "collective" ? Object.keys(colours).find((each) => name.startsWith(each)) : kind;
    const sent = kind === "collective" ? `, a rank sends ${zx.bytes(Math.round(nbytes))}` : "";
    return { row: streams.indexOf(stream), start, end, colour: colours[key] || zx.colour("wait"), label: kind === "wait" ? "exposed" : name, ink: kind === "kernel" ? zx.colour("text") : "#fff", told: `${part}: ${name.length > 160 ? name.slice(0, 160) + "…" : name}, ${zx.time(end - start)}${sent}`, kind, part, name };
  });
  const chart = zx.el("div", { class: "plot" }), tip = zx.el("p", { class: "tip mono" }), time = program.time;
  const swatch = (colour, text) => zx.el("span", {}, zx.el("i", { class: "swatch", style: `background:${colour}` }), text);
  const waits = boxes.filter((box) => box.kind === "wait").sort((a, b) => b.end - b.start - a.end + a.start).slice(0, 12);
  main.append(zx.el("div", { class: "wide" }, zx.el("h2", {}, `One step, predicted for ${program.machine}`), zx.el("p", {}, program.words.find((text) => text.includes("predicted")) || ""),
    zx.el("p", { class: "key" }, swatch(colours.kernel, "kernels"), swatch(colours.all_gather, "all-gather"), swatch(colours.reduce_scatter, "reduce-scatter"), swatch(colours.all_reduce, "all-reduce"), swatch(colours.wait, "exposed: computation waits")), tip, chart,
    zx.el("h3", {}, waits.length ? "The longest waits" : "Computation never waits for a collective"), waits.length ? zx.table(["wait", "half", "takes", "of the step"], waits.map((box) => [box.name.replace("wait for ", ""), box.part, zx.time(box.end - box.start), ((100 * (box.end - box.start)) / time.step).toFixed(1) + " %"]), { numbers: [2, 3] }) : ""));
  zx.rows(chart, tip, boxes, streams, (value) => zx.time(value));
};

zx.views.pipeline = function (main) {
  const pipeline = zx.data.pipeline, kinds = { F: "kernel", B: "scatter", I: "gather", W: "cast" };
  const names = { F: "forward", B: "backward", I: "backward for inputs", W: "backward for weights" };
  const used = new Set();
  const boxes = pipeline.chart.flatMap((rank, row) => rank.map(([kind, stage, part, start, end]) => {
    used.add(kind);
    return { row, start, end, colour: zx.colour(kinds[kind]), label: pipeline.stages.length > pipeline.ranks ? `${stage}:${part}` : `${part}`, ink: kind === "F" ? zx.colour("text") : "#fff", told: `${names[kind]} of stage ${stage} on micro-batch ${part}` };
  }));
  const chart = zx.el("div", { class: "plot" }), tip = zx.el("p", { class: "tip mono" });
  const stages = pipeline.stages.map((s, i) => [i, pipeline.places[i], s.first || "-", s.last || "-", zx.time(s.seconds), zx.bytes(s.params), zx.bytes(s.activations), zx.bytes(s.memory), zx.bytes(s.sent)]);
  const bubble = `${(100 * pipeline.bubble).toFixed(1)} %` + (pipeline.expected === null ? "" : ` (closed form ${(100 * pipeline.expected).toFixed(1)} %)`);
  main.append(zx.el("div", { class: "wide" }, zx.el("h2", {}, `Pipeline ${pipeline.schedule}: ${pipeline.stages.length} stages on ${pipeline.ranks} ranks, ${pipeline.microbatches} micro-batches`),
    zx.el("p", {}, `Each rank stands still for ${bubble} of a step, for stages that take equally long; the slowest stage takes ${pipeline.imbalance.toFixed(3)} of an even one on ${pipeline.machine}.` + (pipeline.limit ? ` ${pipeline.limit[0].toUpperCase()}${pipeline.limit.slice(1)}.` : "")),
    zx.el("p", { class: "key" }, [...used].map((kind) => zx.el("span", {}, zx.el("i", { class: "swatch", style: `background:${zx.colour(kinds[kind])}` }), names[kind])), "numbers in boxes are micro-batches; time is in forwards of a stage"), tip, chart,
    zx.el("h2", {}, "Stages"), zx.table(["stage", "rank", "from", "to", "time", "parameters", "activations", "memory", "sent"], stages, { numbers: [0, 1, 4, 5, 6, 7, 8] })));
  zx.rows(chart, tip, boxes, pipeline.chart.map((_, rank) => "rank " + rank), (value) => value.toFixed(0));
};
