// A small time chart on a canvas: areas or lines over the last minutes, with the values under the pointer.

const WINDOWS = [120, 300, 600];
const LEFT = 42, RIGHT = 4, TOP = 6, BOTTOM = 16;

/** The least round number that is not below `value`: 1, 2 or 5 times a power of ten. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /**
   * series: [{ name, label, color, fill, format }], `name` being a column of the history.
   * top: a fixed upper end of the scale; without it the scale follows the data.
   */
  constructor(canvas, key, series, { top = null, format = (value) => value.toLocaleString("en") } = {}) {
    Object.assign(this, { canvas, key, series, top, format, history: null, at: null });
    canvas.addEventListener("pointermove", (event) => { this.at = event.offsetX; this.draw(); });
    canvas.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    this.keys = series.map(({ label, color }) => {
      const item = document.createElement("span");
      item.className = "key";
      const mark = document.createElement("i");
      mark.dataset.color = color;
      const value = document.createElement("b");
      item.append(mark, `${label} `, value);
      key.append(item);
      return value;
    });
  }

  show(history) {
    this.history = history;
    this.draw();
  }

  draw() {
    const { canvas, history } = this;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!history || !history.time.length || !width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();

    const { time } = history;
    const now = time[time.length - 1];
    const span = WINDOWS.find((seconds) => now - time[0] <= seconds) || WINDOWS[WINDOWS.length - 1];
    let highest = 0;
    for (const { name } of this.series) for (const value of history[name]) highest = Math.max(highest, value || 0);
    const top = this.top ?? roundUp(highest);
    const x = (moment) => LEFT + (1 - (now - moment) / span) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * (height - TOP - BOTTOM);

    this.axes(pen, width, height, { top, span, x, y, color });
    for (const line of this.series) this.line(pen, history, line, { now, span, x, y, color, base: y(0) });
    this.values(pen, height, { x, now, span, width, color });
  }

  axes(pen, width, height, { top, span, x, y, color }) {
    pen.font = "10px system-ui, sans-serif";
    pen.fillStyle = color("faint");
    pen.strokeStyle = color("grid");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y(share * top)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, level);
      pen.lineTo(width - RIGHT, level);
      pen.stroke();
      pen.fillText(this.format(share * top), LEFT - 6, level + 3);
    }
    pen.textAlign = "left";
    pen.fillText(`${span / 60} min ago`, LEFT, height - 3);
    pen.textAlign = "right";
    pen.fillText("now", width - RIGHT, height - 3);
  }

  line(pen, history, { name, color: tone, fill }, { now, span, x, y, color, base }) {
    const values = history[name];
    pen.strokeStyle = pen.fillStyle = color(tone);
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    let piece = [];
    const flush = () => {
      if (piece.length) {
        pen.beginPath();
        piece.forEach(([left, up], index) => (index ? pen.lineTo(left, up) : pen.moveTo(left, up)));
        pen.stroke();
        if (fill) {
          pen.lineTo(piece[piece.length - 1][0], base);
          pen.lineTo(piece[0][0], base);
          pen.globalAlpha = 0.14;
          pen.fill();
          pen.globalAlpha = 1;
        }
      }
      piece = [];
    };
    values.forEach((value, index) => {
      if (value === null || now - history.time[index] > span) flush();
      else piece.push([x(history.time[index]), y(value)]);
    });
    flush();
  }

  /** The figures beside the title: the newest, or those under the pointer. */
  values(pen, height, { x, now, span, width, color }) {
    const { time } = this.history;
    let index = time.length - 1;
    if (this.at !== null) {
      const moment = now - (1 - (this.at - LEFT) / (width - LEFT - RIGHT)) * span;
      index = time.findIndex((candidate) => candidate >= moment);
      if (index < 0) index = time.length - 1;
      const left = Math.round(x(time[index])) + 0.5;
      pen.strokeStyle = color("faint");
      pen.beginPath();
      pen.moveTo(left, TOP);
      pen.lineTo(left, height - BOTTOM);
      pen.stroke();
    }
    this.series.forEach(({ name }, place) => {
      const value = this.history[name][index];
      this.keys[place].textContent = value === null ? "–" : this.format(value);
    });
  }
}
