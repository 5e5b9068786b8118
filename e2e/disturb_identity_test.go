//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var _ = Describe("a node whose SMBIOS is hidden", func() {
	It("gets its instance from its Node object, by a file and by a variable (D-64, D-65, D-66, D-67)",
		func(ctx SpecContext) {
			doctor := newDoctor(ctx)
			DeferCleanup(func(ctx SpecContext) {
				for _, kind := range []string{"ClusterRoleBinding", "ClusterRole"} {
					Expect(api.remove(ctx, rbacObject(kind, nodeName))).To(Succeed())
				}
				install(ctx)
			}, NodeTimeout(2*rolloutTimeout))
			for _, via := range []string{"file", "env"} {
				By("telling it by "+via, func() {
					objects := must(kustomized("kustomize/identified", fmt.Sprintf(hideSMBIOS, via)))
					Expect(applyAll(ctx, objects)).To(Succeed())
					Expect(rolledOut(ctx, objects)).To(Succeed())
					for _, worker := range workers {
						Expect(registered(ctx, worker)).To(Succeed())
						Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
						p := installedPod(ctx, ofNode, worker)
						Expect(p.Spec.InitContainers).To(HaveLen(1))
						Expect(machines[worker].run(ctx, fmt.Sprintf("ls -A /proc/%s/root/oxide/sys/class/dmi",
							processOf(ctx, p, "oxide-plugin")))).To(BeEmpty(), "SMBIOS on %s", worker)
					}
				})
			}
			s.Beating(ctx, workers[0], s.Claim(ctx, Claim{}))
			doctor.findsNothing(ctx, "node", workers[0])
		}, NodeTimeout(5*time.Minute))
})

// hideSMBIOS is a kustomization that hides SMBIOS from the drivers of the nodes, and configures
// their instances in another way. It changes both nodes at once, to save time.
const hideSMBIOS = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../e2e]
components: [../instance-metadata/%s]
patches:
  - patch: |
      kind: DaemonSet
      apiVersion: apps/v1
      metadata: {name: oxide-csi-node, namespace: oxide-csi}
      spec:
        updateStrategy: {rollingUpdate: {maxUnavailable: 100%%}}
        template:
          spec:
            containers:
              - name: oxide-plugin
                volumeMounts: [{name: nothing, mountPath: /oxide/sys/class/dmi}]
            volumes: [{name: nothing, emptyDir: {}}]
`

// rbacObject returns an object that names a ClusterRole or its binding.
func rbacObject(kind, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("rbac.authorization.k8s.io/v1")
	o.SetKind(kind)
	o.SetName(name)
	return o
}

// processOf returns the process ID of a container in the namespace of its node.
func processOf(ctx context.Context, p corev1.Pod, container string) string {
	id := containerID(p, container)
	out := must(machines[p.Spec.NodeName].run(ctx,
		"ctr --namespace k8s.io task list | awk '$1 == \""+id+"\" {print $2}'"))
	process := strings.TrimSpace(out)
	Expect(process).NotTo(BeEmpty(), "the process of %s in %s", container, p.Name)
	return process
}
