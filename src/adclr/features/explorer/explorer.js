// The page: what is chosen goes to the server, its answers become pictures, and the address bar keeps up.

import { RAMP, draw, unpack } from "./maps.js";
import { fromAddress, toAddress } from "./state.js";

const $ = (id) => document.getElementById(id);
const STAGE = 380, PANEL = 300, TILE = 128; // pixels that are drawn; the style decides how large they are seen
let state = fromAddress(location.hash);
let models = [], images = []; // images: {name, label, grids, picture}
let answers = [], maps = []; // of each model: to the query, of the view
const panels = [], tiles = [], visible = new Set(), stale = new Set();

// -- asking --

async function ask(what, words) {
  const reply = await fetch(`api/${what}?${new URLSearchParams(words)}`);
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error ?? reply.statusText);
  return body;
}

const chosen = () => Math.max(0, images.findIndex((image) => image.name === state.image));

function viewed(model) {
  const { depth, heads } = models[model], words = { model, known: images.length, temperature: state.temperature };
  if (state.block !== null) words.block = Math.min(state.block, depth - 1);
  if (state.head !== "mean" && state.head < heads) words.head = state.head;
  return words;
}

// One request of a kind at a time: while it runs only the newest wish is kept, so that drawing a box never lags behind.
function newest(work) {
  let running = false, again = false;
  return async function wish() {
    if (running) { again = true; return; }
    running = true;
    try { do { again = false; await work(); } while (again); } finally { running = false; }
  };
}

const query = newest(async () => {
  if (!images.length) return;
  document.body.dataset.busy = "true";
  const words = { image: chosen(), box: state.box.map((edge) => edge.toFixed(4)).join(",") };
  const found = await Promise.all(models.map((_, model) => ask("query", { ...words, ...viewed(model) })));
  answers = found.map((one, model) => ({ ...one, maps: split(one.ids, model, one.maps), match: split(one.ids, model, one.match) }));
  await show();
});

const show = newest(async () => {
  if (state.view === "cls" || state.view === "components") {
    const found = await Promise.all(models.map((_, model) => ask(state.view, viewed(model))));
    const channels = state.view === "components" ? 3 : 1;
    maps = found.map((one, model) => ({ maps: split(one.ids, model, one.maps, channels), peaks: byId(one.ids, one.peaks) }));
  } else if (state.view === "match") {
    maps = answers.map(({ match }) => ({ maps: match }));
  } else {
    maps = answers.map((one) => ({ maps: one.maps, peaks: byId(one.ids, one.peaks) }));
  }
  paint();
  document.body.dataset.busy = "false";
  document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
});

// A map of attention fades as its peak comes down from twice the mean to the mean: a flat one would cover its image with
// one color. A fifth is left, so that one sees that there is a map.
function opacity(model, id) {
  const peak = maps[model]?.peaks?.get(id);
  return peak === undefined ? 1 : 0.2 + 0.8 * clip(peak - 1);
}

const byId = (ids, values) => values && new Map(ids.map((id, place) => [id, values[place]]));

// The maps of all images come one behind the other; each is as large as its image's grid in that model.
function split(ids, model, text, channels = 1) {
  const bytes = unpack(text), found = new Map();
  let start = 0;
  for (const id of ids) {
    const [rows, columns] = images[id].grids[model], size = rows * columns * channels;
    found.set(id, { bytes: bytes.subarray(start, start + size), rows, columns, channels });
    start += size;
  }
  return found;
}

const point = newest(async () => {
  const at = state.patch, number = chosen();
  if (!at || !images.length) return;
  rememberSoon();
  for (let model = 0; model < models.length; model++) {
    const [rows, columns] = images[number].grids[model];
    const row = Math.min(rows - 1, Math.floor(at.y * rows)), column = Math.min(columns - 1, Math.floor(at.x * columns));
    const { maps: text } = await ask("similar", { model, image: number, row, column });
    if (number !== chosen() || !state.patch) return;
    const cell = [column / columns, row / rows, (column + 1) / columns, (row + 1) / rows];
    draw(panels[model].patch.canvas, images[number].picture, PANEL, { bytes: unpack(text), rows, columns, channels: 1 }, [cell]);
    panels[model].patch.note.textContent = "similarity to the patch under the pointer";
  }
  document.body.dataset.pointed = String(Number(document.body.dataset.pointed ?? 0) + 1);
});

const failed = (error) => { $("progress").textContent = `error: ${error.message}`; };
const run = (work) => work().catch(failed);

// -- painting --

const VIEWS = { query: "attention of the query", match: "similarity to the box", cls: "attention of [CLS]", components: "components" };
const MEANINGS = {
  query: "attention from 0 to the top 0.5 % of patches, or to twice the mean if that is more; × is a multiple of the mean; pale: no patch gets twice the mean",
  match: "cosine similarity, from 0 to 1, of the box and the best window of its size at each patch; the frame is the best window",
  cls: "attention from 0 to the top 0.5 % of patches, or to twice the mean if that is more; × is a multiple of the mean; pale: no patch gets twice the mean",
  components: "first three principal components of the patches of all images, as red, green and blue",
};

function paint() {
  const number = chosen(), { picture, name } = images[number];
  $("name").textContent = name;
  $("image").setAttribute("aria-label", `${name}, with the box of the query`);
  $("ramp").style.background = state.view === "components" ? "none" : RAMP;
  $("meaning").textContent = MEANINGS[state.view];
  drawStage();
  models.forEach((model, m) => {
    const { view } = panels[m], peak = maps[m]?.peaks?.get(number);
    const boxes = state.view === "query" || state.view === "match" ? [state.box] : [];
    draw(view.canvas, picture, PANEL, maps[m]?.maps.get(number), boxes, opacity(m, number));
    view.note.textContent = VIEWS[state.view] + (peak ? `, peak ${peak.toFixed(1)}×` : "");
    rank(m);
  });
  remember();
}

// Browsers refuse more than about a hundred addresses within seconds, Chromium silently and Safari with an error, and
// a pointer or a held key goes through more. An address that was refused is written a second later.
let resting = 0;
function remember() {
  clearTimeout(resting);
  const address = toAddress(state);
  try {
    history.replaceState(null, "", address); // which, unlike a new location, calls nobody back
  } catch { /* refused */ }
  if (location.hash !== new URL(address, location.href).hash) resting = setTimeout(remember, 1000);
}

function rememberSoon() {
  clearTimeout(resting);
  resting = setTimeout(remember, 200);
}

function drawStage() {
  draw($("image"), images[chosen()].picture, STAGE * Math.min(2, devicePixelRatio), null, [state.box]);
}

// The paper's words for images of the same class as the query's and of others, where folders are classes.
function relation(id) {
  const own = images[chosen()].label, other = images[id].label;
  if (!own || !other) return "";
  return id === chosen() ? "itself" : own === other ? "matched" : "mismatched";
}

function rank(model) {
  const answer = answers[model], order = answer.ids.map((id, place) => ({ id, place }));
  const worth = { match: answer.scores, answer: answer.answers }[state.rank];
  order.sort((a, b) => (worth ? worth[b.place] - worth[a.place] : 0) || images[a.id].name.localeCompare(images[b.id].name));
  const list = panels[model].list;
  order.forEach(({ id, place }, position) => {
    const tile = tileOf(model, id);
    if (list.children[position] !== tile.item) list.insertBefore(tile.item, list.children[position] ?? null);
    tile.window = answer.windows[place];
    const score = (worth ?? answer.scores)[place].toFixed(2);
    tile.score.textContent = score;
    tile.relation.textContent = relation(id);
    tile.button.setAttribute("aria-pressed", String(id === chosen()));
    tile.button.setAttribute("aria-label", `${position + 1}: ${images[id].name}, ${score}`);
    stale.add(tile);
    if (visible.has(tile)) drawTile(tile);
  });
}

function drawTile(tile) {
  stale.delete(tile);
  const boxes = state.view === "match" ? [tile.window] : [];
  draw(tile.canvas, images[tile.id].picture, TILE, maps[tile.model]?.maps.get(tile.id), boxes, opacity(tile.model, tile.id));
}

// Tiles out of sight are drawn when they come into it.
const watcher = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting } of changes) {
    visible[isIntersecting ? "add" : "delete"](target.tile);
    if (isIntersecting && stale.has(target.tile)) drawTile(target.tile);
  }
}, { rootMargin: "200px" });

function tileOf(model, id) {
  tiles[model] ??= new Map();
  if (!tiles[model].has(id)) {
    const names = ["li", "button", "canvas", "span", "b", "i"];
    const [item, button, canvas, text, score, relation] = names.map((name) => document.createElement(name));
    button.type = "button";
    text.append(score, " ", relation, ` ${images[id].name.split("/").pop()}`);
    button.append(canvas, text);
    item.append(button);
    const tile = { model, id, item, button, canvas, text, score, relation, window: null };
    canvas.width = images[id].picture.naturalWidth;
    canvas.height = images[id].picture.naturalHeight;
    button.addEventListener("click", () => choose(id));
    item.tile = tile;
    watcher.observe(item);
    tiles[model].set(id, tile);
  }
  return tiles[model].get(id);
}

function choose(id) {
  state.image = images[id].name;
  clearPatch();
  run(query);
}

// Points at what the state says, or at nothing.
function showPatch() {
  if (state.patch) run(point);
  else clearPatch();
}

function clearPatch() {
  state.patch = null;
  for (const panel of panels) {
    draw(panel.patch.canvas, images[chosen()].picture, PANEL, null);
    panel.patch.note.textContent = "point at a patch, tap it, or press Alt and an arrow key";
  }
}

// -- the box --

const STEP = 1 / 14; // where the grid is not known; else one patch
const clip = (value) => Math.min(1, Math.max(0, value));

// The middle of the patch beside the one that a place lies in; at an edge, that one's.
function next({ x, y }, [right, down], [rows, columns]) {
  const beside = (share, step, count) => (Math.min(count - 1, Math.max(0, Math.floor(share * count) + step)) + 0.5) / count;
  return { x: beside(x, right, columns), y: beside(y, down, rows) };
}

function place(event) {
  const box = $("image").getBoundingClientRect();
  return { x: clip((event.clientX - box.left) / box.width), y: clip((event.clientY - box.top) / box.height) };
}

function listenToStage() {
  const canvas = $("image");
  let start = null, moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    start = place(event);
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (!start) {
      if (event.pointerType === "mouse") { state.patch = at; run(point); }
      return;
    }
    const box = [Math.min(start.x, at.x), Math.min(start.y, at.y), Math.max(start.x, at.x), Math.max(start.y, at.y)];
    if (box[2] - box[0] < 0.02 || box[3] - box[1] < 0.02) return;
    moved = true;
    state.box = box;
    drawStage();
    run(query);
  });
  // The address has the box when the drag ends, not only when the server has answered.
  const end = () => {
    start = null;
    if (moved) remember();
  };
  canvas.addEventListener("pointerup", (event) => {
    if (start && !moved) { state.patch = place(event); run(point); }
    end();
  });
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && images.length) { clearPatch(); remember(); return; }
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const [rows, columns] = images[chosen()]?.grids[0] ?? [1 / STEP, 1 / STEP], [dx, dy] = [way[0] / columns, way[1] / rows];
    const [left, top, right, bottom] = state.box;
    if (event.altKey) {
      state.patch = state.patch ? next(state.patch, way, [rows, columns]) : { x: (left + right) / 2, y: (top + bottom) / 2 };
      run(point);
      return;
    }
    if (event.shiftKey) {
      state.box = [left, top, clip(Math.max(left + 1 / columns, right + dx)), clip(Math.max(top + 1 / rows, bottom + dy))];
    } else {
      const x = Math.min(1 - right, Math.max(-left, dx)), y = Math.min(1 - bottom, Math.max(-top, dy));
      state.box = [left + x, top + y, right + x, bottom + y];
    }
    drawStage();
    run(query);
  });
}

// -- the controls --

function listenToControls() {
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("view").addEventListener("change", (event) => { state.view = event.target.value; run(show); });
  $("block").addEventListener("input", () => {
    const block = Number($("block").value) - 1;
    state.block = block === models[0].depth - 1 ? null : block;
    controls();
    run(query);
  });
  $("head").addEventListener("change", () => { state.head = $("head").value === "mean" ? "mean" : Number($("head").value); run(query); });
  $("temperature").addEventListener("input", () => { state.temperature = +(2 ** $("temperature").value).toPrecision(3); controls(); run(query); });
  $("rank").addEventListener("change", () => { state.rank = $("rank").value; paint(); });
  $("save").addEventListener("click", save);
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  addEventListener("hashchange", () => {
    if (toAddress(state) === location.hash) return;
    state = fromAddress(location.hash);
    settle();
    controls();
    showPatch();
    run(query);
  });
  addEventListener("keydown", (event) => {
    const view = ["query", "match", "cls", "components"][Number(event.key) - 1];
    if (!view || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(event.target.tagName)) return;
    state.view = view;
    controls();
    run(show);
  });
}

function controls() {
  const { depth, heads } = models[0], block = state.block ?? depth - 1;
  document.querySelector(`#view input[value="${state.view}"]`).checked = true;
  Object.assign($("block"), { max: depth, value: Math.min(block, depth - 1) + 1 });
  $("block").nextElementSibling.textContent = `${Math.min(block, depth - 1) + 1} of ${depth}`;
  if ($("head").options.length !== heads + 1) {
    $("head").replaceChildren(new Option("mean", "mean"), ...Array.from({ length: heads }, (_, head) => new Option(head, head)));
  }
  if (state.head !== "mean" && state.head >= heads) state.head = "mean";
  $("head").value = state.head;
  $("temperature").value = Math.log2(state.temperature);
  $("temperature").nextElementSibling.textContent = state.temperature;
  $("rank").value = state.rank;
}

// A link may name an image that is not here.
function settle() {
  if (!images.some((image) => image.name === state.image)) state.image = images[0].name;
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* private windows have no memory */ }
}

// -- saving --

function save() {
  const gap = 12, line = 20, shown = 10, pieces = [];
  let y = gap;
  const row = (cells, side) => {
    let x = gap;
    for (const { canvas, text } of cells) {
      const scale = side / Math.max(canvas.width, canvas.height);
      pieces.push({ canvas, text, x, y, width: canvas.width * scale, height: canvas.height * scale });
      x += side + gap;
    }
    y += side + line + gap;
    return x;
  };
  const label = (panel, figure) => `${panel.name}: ${figure.note.textContent}`;
  const views = panels.map((panel) => ({ canvas: panel.view.canvas, text: label(panel, panel.view) }));
  const wide = [row([{ canvas: $("image"), text: state.image }, ...views], 320)];
  for (const panel of panels) {
    const first = [...panel.list.children].slice(0, shown).map(({ tile }) => ({ canvas: tile.canvas, text: tile.text.textContent }));
    wide.push(row(first, 130));
  }
  const paper = Object.assign(document.createElement("canvas"), { width: Math.max(...wide), height: y });
  const pen = paper.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, paper.width, paper.height);
  pen.fillStyle = "#1b1b1b";
  pen.font = "12px system-ui, sans-serif";
  for (const { canvas, text, x, y: top, width, height } of pieces) {
    pen.drawImage(canvas, x, top, width, height);
    pen.fillText(text, x, top + height + 15, Math.max(width, 130));
  }
  paper.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "adclr.png" });
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

// -- the beginning --

function build() {
  models.forEach((model, m) => {
    const figure = (title) => {
      const [whole, canvas, words, name, note] = ["figure", "canvas", "figcaption", "b", "span"].map((tag) => document.createElement(tag));
      name.textContent = models.length > 1 ? title : "";
      words.append(name, " ", note);
      whole.append(canvas, words);
      $("panels").append(whole);
      return { canvas, note };
    };
    const [column, head, list] = ["div", "h2", "ol"].map((tag) => document.createElement(tag));
    head.textContent = models.length > 1 ? model.name : "";
    list.className = "tiles";
    column.append(head, list);
    $("results").append(column);
    panels[m] = { name: model.name, view: figure(model.name), patch: figure(model.name), list };
  });
  $("results").dataset.models = models.length;
}

async function follow() {
  const found = await ask("state", { since: images.length });
  const first = !models.length;
  models = found.models;
  if (first) build();
  const from = images.length;
  const loaded = await Promise.all(found.images.map(async (image, place) => {
    const picture = Object.assign(new Image(), { src: `image/${from + place}.jpg` });
    await picture.decode();
    return { ...image, picture };
  }));
  images.push(...loaded);
  const skipped = found.skipped ? `; ${found.skipped} could not be read` : "";
  $("progress").textContent = found.finished ? (found.note || `${images.length} images`) + skipped : `reading ${found.tried} of ${found.total}`;
  if (images.length && (found.finished || !state.image)) settle();
  if (images.length && from === 0) controls();
  if (loaded.length) showPatch(); // the link's image may come late
  if (!found.finished) setTimeout(() => run(follow), 500);
  else if (!images.length) document.body.dataset.busy = "false";
  if (loaded.length) await query();
  document.body.dataset.finished = String(found.finished);
}

let liked = null;
try { liked = localStorage.getItem("theme"); } catch { /* as above */ }
theme(liked ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
listenToStage();
listenToControls();
run(follow);
