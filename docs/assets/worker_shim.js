// Search runs in a Worker, which browsers refuse for pages opened from the disk (file://). There an invisible iframe takes
// its place: the script of the worker runs in it, and messages are passed as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><body></body>"
      frame.onload = () => {
        const inside = frame.contentWindow
        inside.importScripts = () => {}
        inside.postMessage = data => {
          const event = new MessageEvent("message", { data })
          if (this.onmessage) this.onmessage(event)
          this.dispatchEvent(event)
        }
        const script = inside.document.createElement("script")
        script.src = new URL(url, document.baseURI).href
        script.onload = () => {
          this.inside = inside
          this.queue.splice(0).forEach(data => this.postMessage(data))
        }
        inside.document.body.append(script)
      }
      this.frame = frame
      const attach = () => document.body.append(frame)
      document.body ? attach() : addEventListener("DOMContentLoaded", attach)
    }
    postMessage(data) {
      if (!this.inside) return void this.queue.push(data)
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
