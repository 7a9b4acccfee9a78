// Browsers start no worker for a page that is opened from a file. Here a frame of the page runs the worker's script, so that
// the search also works there; mkdocs.yml names this file as the polyfill of Material's offline plugin.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      const waiting = []
      this.deliver = (data) => waiting.push(data)
      document.addEventListener("DOMContentLoaded", () => this.start(frame, url, waiting), { once: true })
      if (document.readyState !== "loading") this.start(frame, url, waiting)
    }

    start(frame, url, waiting) {
      if (frame.isConnected) return
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }))
        for (const data of waiting) this.deliver(data)
      }
      inside.document.head.append(script)
    }

    postMessage(data) {
      this.deliver(data)
    }

    terminate() {}
  }
}
