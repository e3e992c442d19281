// Maps of patches, drawn over their image as the pictures of `adclr visualize` are: cubic between patches, in viridis.
// Other than there, flat maps of attention fade: on a tile no plain copy of the image stands beside them.

const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98],
  [170, 220, 50], [253, 231, 37]];
const COLORS = Uint8ClampedArray.from({ length: 256 * 3 }, (_, i) => {
  const place = (Math.floor(i / 3) / 255) * 8, below = Math.min(7, Math.floor(place)), part = place - below;
  return VIRIDIS[below][i % 3] * (1 - part) + VIRIDIS[below + 1][i % 3] * part;
});
export const RAMP = `linear-gradient(90deg, ${VIRIDIS.map((c) => `rgb(${c})`).join(",")})`;
const MARK = "#f0b429", STRENGTH = 0.75;

export function unpack(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// For each pixel of a side, the four patches around it and their weights: Catmull and Rom's curve, edges repeated.
function taps(patches, pixels) {
  return Array.from({ length: pixels }, (_, pixel) => {
    const place = ((pixel + 0.5) / pixels) * patches - 0.5, first = Math.floor(place), t = place - first;
    const weights = [((2 - t) * t - 1) * t / 2, ((3 * t - 5) * t * t + 2) / 2, ((4 - 3 * t) * t + 1) * t / 2, (t - 1) * t * t / 2];
    return weights.map((weight, i) => [Math.min(patches - 1, Math.max(0, first - 1 + i)), weight]);
  });
}

function enlarged(bytes, rows, columns, channels, width, height) {
  const across = taps(columns, width), down = taps(rows, height), wide = new Float32Array(rows * width * channels);
  for (let row = 0; row < rows; row++)
    for (let x = 0; x < width; x++)
      for (let c = 0; c < channels; c++) {
        let sum = 0;
        for (const [column, weight] of across[x]) sum += weight * bytes[(row * columns + column) * channels + c];
        wide[(row * width + x) * channels + c] = sum;
      }
  const found = new Uint8ClampedArray(width * height * channels);
  for (let y = 0; y < height; y++)
    for (let i = 0; i < width * channels; i++) {
      let sum = 0;
      for (const [row, weight] of down[y]) sum += weight * wide[row * width * channels + i];
      found[y * width * channels + i] = sum;
    }
  return found;
}

function colorize(map, width, height) {
  const values = enlarged(map.bytes, map.rows, map.columns, map.channels, width, height), image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++)
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = map.channels === 3 ? values[3 * i + c] : COLORS[3 * values[i] + c];
  for (let i = 3; i < image.data.length; i += 4) image.data[i] = 255;
  return image;
}

const scratch = document.createElement("canvas");

// A map is {bytes, rows, columns, channels: 1 or 3}; without one the image is drawn as it is. `share` is how much of the
// usual opacity the map gets.
export function draw(canvas, image, side, map, boxes = [], share = 1) {
  const scale = side / Math.max(image.naturalWidth, image.naturalHeight);
  const width = Math.max(1, Math.round(image.naturalWidth * scale)), height = Math.max(1, Math.round(image.naturalHeight * scale));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.globalCompositeOperation = "source-over";
  pen.drawImage(image, 0, 0, width, height);
  if (map) {
    pen.globalCompositeOperation = "saturation";
    pen.fillStyle = "gray";
    pen.fillRect(0, 0, width, height);
    pen.globalCompositeOperation = "source-over";
    Object.assign(scratch, { width, height });
    scratch.getContext("2d").putImageData(colorize(map, width, height), 0, 0);
    pen.globalAlpha = map.channels === 3 ? 1 : STRENGTH * share;
    pen.drawImage(scratch, 0, 0);
    pen.globalAlpha = 1;
  }
  for (const [left, top, right, bottom] of boxes) {
    const line = Math.max(1.5, side / 150);
    for (const [color, thick] of [["#000", line + 2], [MARK, line]]) {
      pen.strokeStyle = color;
      pen.lineWidth = thick;
      pen.strokeRect(left * width, top * height, (right - left) * width, (bottom - top) * height);
    }
  }
}
