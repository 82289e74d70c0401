"use strict";
// Runs in the browser for check_site.py, which defines PAGES, WIDTHS, SCHEMES, OVERFLOW and SCROLLS before it: loads each page
// in a frame, collects what is wrong, and writes it to the document.

const wrong = [];
async function open(page, width, scheme) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style = `width:${width}px;height:900px;border:0`;
  localStorage.setItem("/.__palette", JSON.stringify({ index: SCHEMES.indexOf(scheme), color: { scheme } }));
  const say = (text) => wrong.push(`${page} at ${width}, ${scheme}: ${text}`);
  await new Promise((done) => {
    frame.onload = done;
    frame.src = "/" + page;
    const watch = setInterval(() => {
      const inside = frame.contentWindow;
      if (inside === null || inside.location.href === "about:blank" || inside.watched) return;
      inside.watched = true;
      clearInterval(watch);
      inside.addEventListener("error", (event) => say(`error: ${event.message || event.target.src}`), true);
      inside.addEventListener("unhandledrejection", (event) => say(`rejected: ${event.reason}`));
      for (const kind of ["error", "warn"]) {
        inside.console[kind] = (...values) => say(`${kind}: ${values.join(" ")}`);
      }
    }, 1);
    setTimeout(done, 15000);
  });
  await new Promise((done) => setTimeout(done, 150));
  const inside = frame.contentDocument;
  inside.body.setAttribute("data-md-color-scheme", scheme);
  const excess = inside.documentElement.scrollWidth - width;
  if (excess > OVERFLOW) {
    const widest = [...inside.querySelectorAll("article *")]
      .filter((each) => each.getBoundingClientRect().right > width + OVERFLOW && !each.closest(SCROLLS));
    say(`${excess} px too wide: ${widest.slice(0, 3).map((each) => each.outerHTML.slice(0, 80)).join(" ... ")}`);
  }
  for (const image of inside.images) {
    if (image.loading !== "lazy" && image.complete && !image.naturalWidth) say(`no picture ${image.src}`);
  }
  frame.remove();
}
(async () => {
  for (const page of PAGES) {
    for (const width of WIDTHS) {
      for (const scheme of SCHEMES) await open(page, width, scheme);
    }
  }
  document.body.innerHTML = "<pre></pre>";
  document.querySelector("pre").textContent = JSON.stringify(wrong);
})();
