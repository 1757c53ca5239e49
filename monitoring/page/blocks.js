// The block map: every KV block of the pool a cell, in the order of block ids.

export const STATES = [
  ["a", "active", "in use by one sequence"],
  ["s", "shared", "in use by several sequences"],
  ["c", "cached", "unused, its prefix is kept until the block is needed"],
  ["f", "free", "empty"],
  ["r", "reserved", "the null block, or waiting for a step in flight"],
];
const NAMES = Object.fromEntries(STATES.map(([letter, name]) => [letter, name]));
const SIZES = [18, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2];
const TALLEST = 280;
const TALLEST_FINE = 900; // what a very large pool may take, before a cell stands for several blocks

/** "3f2as" -> "fffaas". */
export function unpack(runs) {
  let states = "";
  for (const [, length, letter] of runs.matchAll(/(\d*)([a-z])/g)) states += letter.repeat(length || 1);
  return states;
}

export function count(states) {
  const counts = Object.fromEntries(STATES.map(([letter]) => [letter, 0]));
  for (const letter of states) counts[letter] += 1;
  return counts;
}

/** How large a cell may be so that `blocks` of them fill `width` pixels and stay in sight. */
export function layout(blocks, width) {
  for (const size of SIZES) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(blocks / columns);
    const limit = size > 2 ? TALLEST : TALLEST_FINE;
    if (rows * size <= limit) return { size, columns, rows, group: 1 };
  }
  const columns = Math.floor(width / 2);
  const group = Math.ceil(blocks / (columns * (TALLEST_FINE / 2)));
  return { size: 2, columns, rows: Math.ceil(blocks / group / columns), group };
}

export class BlockMap {
  constructor(canvas, tip, note) {
    this.canvas = canvas;
    this.tip = tip;
    this.note = note;
    this.states = "";
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  show(states) {
    this.states = states;
    this.draw();
  }

  draw() {
    const { canvas, states } = this;
    const width = canvas.parentElement.clientWidth;
    if (!states || !width) return;
    const plan = this.plan = layout(states.length, width);
    const { size, columns, rows, group } = plan;
    const scale = window.devicePixelRatio || 1;
    const height = rows * size;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const gap = size >= 10 ? 2 : size >= 4 ? 1 : 0;
    const style = getComputedStyle(document.documentElement);
    for (const [letter, name] of STATES) {
      pen.fillStyle = style.getPropertyValue(`--${name}`);
      pen.beginPath();
      for (let cell = 0; cell * group < states.length; cell += 1) {
        if (this.cellState(cell) !== letter) continue;
        const x = (cell % columns) * size, y = Math.floor(cell / columns) * size;
        if (size >= 10) pen.roundRect(x, y, size - gap, size - gap, 2);
        else pen.rect(x, y, size - gap, size - gap);
      }
      pen.fill();
    }
    this.note.textContent = group > 1 ? `1 cell = ${group} blocks` : `${states.length.toLocaleString("en")} blocks`;
  }

  /** A cell that stands for several blocks shows the busiest of them. */
  cellState(cell) {
    const { group } = this.plan;
    if (group === 1) return this.states[cell];
    const part = this.states.slice(cell * group, (cell + 1) * group);
    return ["s", "a", "c", "r", "f"].find((letter) => part.includes(letter));
  }

  point(event) {
    if (!this.plan) return;
    const { size, columns, group } = this.plan;
    const column = Math.floor(event.offsetX / size), row = Math.floor(event.offsetY / size);
    const cell = row * columns + column;
    const first = cell * group;
    if (column < 0 || column >= columns || row < 0 || first >= this.states.length) {
      this.tip.hidden = true;
      return;
    }
    const ids = group > 1 ? `blocks ${first}–${Math.min(first + group, this.states.length) - 1}` : `block ${first}`;
    this.tip.textContent = `${ids}: ${NAMES[this.cellState(cell)]}`;
    this.tip.hidden = false;
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, event.offsetX + 12))}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }
}
