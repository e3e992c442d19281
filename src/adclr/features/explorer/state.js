// What is looked at, as the address bar has it: a link gives the same view again.

// patch: the place that is pointed at, {x, y} as shares of the width and height, since networks differ in their patches
const FRESH = { image: "", box: [0.35, 0.35, 0.65, 0.65], patch: null, view: "query", block: null, head: "mean", temperature: 1, rank: "match" };
const VIEWS = ["query", "match", "cls", "components"], RANKS = ["match", "answer", "name"];

const between = (text, low, high) => {
  const number = Number(text);
  return text !== null && text !== "" && number >= low && number <= high ? number : null;
};

export function fromAddress(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, "")), state = structuredClone(FRESH);
  const box = (words.get("box") ?? "").split(",").map((edge) => between(edge, 0, 1));
  if (box.length === 4 && !box.includes(null) && box[2] - box[0] > 0.001 && box[3] - box[1] > 0.001) state.box = box;
  const patch = (words.get("patch") ?? "").split(",").map((share) => between(share, 0, 1));
  if (patch.length === 2 && !patch.includes(null)) state.patch = { x: patch[0], y: patch[1] };
  if (VIEWS.includes(words.get("view"))) state.view = words.get("view");
  if (RANKS.includes(words.get("rank"))) state.rank = words.get("rank");
  state.image = words.get("image") ?? "";
  state.block = between(words.get("block"), 0, 999);
  state.temperature = between(words.get("temperature"), 0.05, 100) ?? 1;
  const head = between(words.get("head"), 0, 999);
  state.head = head === null ? "mean" : Math.floor(head);
  return state;
}

export function toAddress(state) {
  const words = new URLSearchParams({ image: state.image, box: state.box.map((edge) => +edge.toFixed(4)).join(",") });
  if (state.patch) words.set("patch", [state.patch.x, state.patch.y].map((share) => +share.toFixed(4)).join(","));
  for (const key of ["view", "block", "head", "temperature", "rank"]) {
    if (state[key] !== FRESH[key]) words.set(key, state[key]);
  }
  return `#${words.toString().replaceAll("%2C", ",").replaceAll("%2F", "/")}`;
}
