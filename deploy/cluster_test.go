package deploy_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

func TestControllerAndNodeHaveRightsOfTheirOwn(t *testing.T) { // D-54
	all := objects(t, everything()...)
	roles := map[string]string{}
	for _, kind := range []string{"ClusterRoleBinding", "RoleBinding"} {
		for _, o := range all.kinds(kind) {
			var subjects []rbacv1.Subject
			if kind == "ClusterRoleBinding" {
				subjects = find[rbacv1.ClusterRoleBinding](t, all, kind, o.GetName()).Subjects
			} else {
				subjects = find[rbacv1.RoleBinding](t, all, kind, o.GetName()).Subjects
			}
			if len(subjects) != 1 || subjects[0].Kind != "ServiceAccount" ||
				subjects[0].Namespace != "oxide-csi" {
				t.Errorf("%s %s is for %v", kind, o.GetName(), subjects)
				continue
			}
			roles[kind+" "+o.GetName()] = subjects[0].Name
		}
	}
	want := map[string]string{
		"ClusterRoleBinding oxide-csi-controller":           controllerName,
		"ClusterRoleBinding oxide-csi-controller-snapshots": controllerName,
		"ClusterRoleBinding oxide-csi-node":                 nodeName,
		"ClusterRoleBinding " + leaveRole:                   nodeName,
		"ClusterRoleBinding " + keeperName:                  keeperName,
		"RoleBinding oxide-csi-controller":                  controllerName,
		"RoleBinding " + keeperName:                         keeperName,
	}
	if !maps.Equal(roles, want) {
		t.Errorf("the bindings are %v, want %v", roles, want)
	}
	for name, pod := range pods(t, all) {
		if pod.Spec.ServiceAccountName != name {
			t.Errorf("the pods of %s run as %s", name, pod.Spec.ServiceAccountName)
		}
	}
	node := find[rbacv1.ClusterRole](t, all, "ClusterRole", nodeName)
	if got := fmt.Sprint(node.Rules); got != "[{[get] [] [nodes] [] []}]" {
		t.Errorf("the node may %s, want to get nodes only", got)
	}
	if n := len(objects(t).kinds("ClusterRole")); n != 1 {
		t.Errorf("by default there are %d cluster roles, want the controller's alone", n)
	}
}

func TestEachRuleOfARoleHasOneResourceAndNoWildcard(t *testing.T) { // D-54
	all := objects(t, append(everything(), audited()...)...)
	count := 0
	for _, o := range append(all.kinds("ClusterRole"), all.kinds("Role")...) {
		role := find[rbacv1.ClusterRole](t, manifests{o}, o.GetKind(), o.GetName())
		for _, rule := range role.Rules {
			count++
			words := slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs)
			if slices.Contains(words, "*") || slices.Contains(rule.Resources, "secrets") ||
				len(rule.Resources) != 1 || len(rule.APIGroups) != 1 {
				t.Errorf("%s has the rule %v", o.GetName(), rule)
			}
		}
	}
	if count < 10 {
		t.Errorf("there are only %d rules; is this test reading them?", count)
	}
	if got := rights(t, objects(t), "ClusterRole", controllerName)["nodes"]; got != "" {
		t.Errorf("the controller may %s nodes, which it needs for a topology only", got)
	}
	for _, topology := range []string{"topology=rack=a", "topologyInstance=true"} {
		got := rights(t, objects(t, with(topology)...), "ClusterRole", controllerName)
		if got["nodes"] != "list watch" || !strings.Contains(got["persistentvolumeclaims"], "update") {
			t.Errorf("with %s the provisioner has the rights %v", topology, got)
		}
	}
}

func TestEveryImageCanComeFromAnywhere(t *testing.T) { // D-40
	pulled := regexp.MustCompile(`(?m)^\s*(?:- )?image: (\S+)$`)
	images := func(args ...string) []string {
		text := strings.Join(slices.Collect(maps.Values(render(t, append(everything(), args...)...))), "")
		var found []string
		for _, m := range pulled.FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
		slices.Sort(found)
		return slices.Compact(found)
	}
	ours := images()
	if len(ours) != 9 {
		t.Fatalf("there are the images %q, expected 9", ours)
	}
	for i, got := range images(with("imageRegistry=mirror.example.com/oxide/")...) {
		name, ok := strings.CutPrefix(got, "mirror.example.com/oxide/")
		if !ok || !slices.Contains(ours, name) && !slices.Contains(ours, "registry.k8s.io/"+name) {
			t.Errorf("with a mirror, image %d is %s", i, got)
		}
	}
	digest := "sha256:" + strings.Repeat("a", 64)
	values := []string{"image", "nodeImage", "instanceMetadata.image", "nodeKeeper.image",
		"provisioner.image", "attacher.image", "snapshotter.image", "registrar.image",
		"livenessProbe.image"}
	var tagged, digested, want []string
	for _, v := range values {
		name := strings.ToLower(v)
		tagged = append(tagged, v+".registry=other.example.com", v+".repository=x/"+name, v+".tag=v9")
		digested = append(digested, v+".digest="+digest)
		want = append(want, "other.example.com/x/"+name+":v9")
	}
	slices.Sort(want)
	if got := images(with(tagged...)...); !slices.Equal(got, want) {
		t.Errorf("with names of one's own the images are %q, want %q", got, want)
	}
	for _, got := range images(with(digested...)...) {
		if !strings.HasSuffix(got, "@"+digest) {
			t.Errorf("with a digest an image is %s", got)
		}
	}
	all := objects(t, kept("imagePullSecrets[0].name=pull", "imagePullPolicy=Never")...)
	for name, pod := range pods(t, all) {
		if len(pod.Spec.ImagePullSecrets) != 1 || pod.Spec.ImagePullSecrets[0].Name != "pull" ||
			pod.Spec.Containers[0].ImagePullPolicy != corev1.PullNever {
			t.Errorf("%s pulls with %v, %s", name, pod.Spec.ImagePullSecrets,
				pod.Spec.Containers[0].ImagePullPolicy)
		}
	}
}

// newer reports whether the image is pinned to that version or a newer one.
func newer(t *testing.T, image string, than [3]int) bool {
	t.Helper()
	var got [3]int
	_, tag, _ := strings.Cut(image, ":v")
	n, _ := fmt.Sscanf(tag, "%d.%d.%d", &got[0], &got[1], &got[2])
	return n == 3 && slices.Compare(got[:], than[:]) >= 0
}

func TestTheDriverKnowsEveryVariableInTheManifests(t *testing.T) { // B-23
	out, complaints, err := run(t, nil, program(t, "oxide-csi-plugin"), "--help")
	help := out + complaints
	known := regexp.MustCompile(`\$((?:CSI|OXIDE)_[A-Z_]+)`).FindAllStringSubmatch(help, -1)
	if len(known) < 15 {
		t.Fatalf("the driver's help names %d variables (%v):\n%s", len(known), err, help)
	}
	forms := map[string]manifests{
		"the chart, file": objects(t, everything()...),
		"the chart, variable": objects(t, with("instanceMetadata.enabled=true",
			"instanceMetadata.via=env")...),
		"the e2e overlay": build(t, "kustomize/e2e"),
	}
	given := map[string]bool{}
	for name, all := range forms {
		for _, pod := range []corev1.PodSpec{
			find[appsv1.Deployment](t, all, "Deployment", controllerName).Spec.Template.Spec,
			find[appsv1.DaemonSet](t, all, "DaemonSet", nodeName).Spec.Template.Spec,
		} {
			for _, v := range container(t, pod, pluginName).Env {
				given[v.Name] = true
				if !slices.ContainsFunc(known, func(k []string) bool { return k[1] == v.Name }) {
					t.Errorf("%s sets %s, which the driver does not know", name, v.Name)
				}
			}
		}
	}
	if len(given) < 15 {
		t.Errorf("the manifests set only %q", slices.Sorted(maps.Keys(given)))
	}
}
