// Runs the search of the theme in pages that are opened as files, where browsers refuse to start a
// Worker. The script runs in a hidden frame instead, with `postMessage` and `importScripts` of its own.
if (location.protocol === "file:") {
  const loadScripts = (...urls) =>
    urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { src: url, onload: resolve, onerror: reject });
      document.head.appendChild(script);
    })), Promise.resolve());

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.ready = new Promise((resolve) => { this.resolve = resolve; });
      inside.document.open();
      inside.document.write(
        `<script>postMessage = (data) => parent.postMessage(data, "*");` +
        `importScripts = ${loadScripts};<\/script><script src="${url}"><\/script>`);
      inside.document.close();
      this.frame.onload = this.resolve;
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
